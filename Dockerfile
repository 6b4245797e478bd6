# docker build -t titan_linear .
# docker run --gpus all --ipc host --stop-timeout 600 -e CONFIG_FILE=/data/mine.toml -v "$PWD:/data" titan_linear \
#     --job.dump_folder /data/outputs/mine
#
# docker stop saves first, for as long as --stop-timeout; the same command resumes. Without a GPU the demo runs.
FROM python:3.12-slim
# Triton and torch.compile call a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /titan_linear
COPY pyproject.toml README.md LICENSE run_train.sh ./
COPY titan_linear titan_linear
COPY tools tools
COPY train_configs train_configs
RUN pip install --no-cache-dir -e '.[gpu,report]'
ENTRYPOINT ["./run_train.sh"]
