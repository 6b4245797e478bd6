"""Commands beside training, a file for each; the doctor is in proof/, and `titan-linear train` in launch.py."""
