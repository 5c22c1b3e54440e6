# nbcnn with the compiler of its kernels: docker build -t nbcnn . && docker run --gpus all -v "$PWD:/work" nbcnn train --dataset digits
# The driver is the host's, from 580 on; NVVM and nvJitLink come with the extra cu13. Not tried.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends git python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 nbcnn \
    && mkdir /work \
    && chown nbcnn /work
COPY . /src
RUN python3 -m venv /opt/nbcnn \
    && /opt/nbcnn/bin/pip install --no-cache-dir "/src[plots,svm,onnx,cu13]" \
    && chown -R nbcnn /opt/nbcnn
ENV PATH=/opt/nbcnn/bin:$PATH
USER nbcnn
WORKDIR /work
ENTRYPOINT ["python", "-m", "nbcnn"]
CMD ["env"]
