"""Groups of hydra for verl, as pkg://titan_linear.verl.config."""
