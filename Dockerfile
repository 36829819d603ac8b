# docker build --build-arg TARGET=cpu -t mesh-transformer:cpu .      TARGET: cpu, tpu or cuda
# The Debian and the Python that scripts/image_check.sh tests without Docker.
ARG BASE=python:3.13-slim-trixie

FROM ${BASE} AS packages
ARG TARGET=cpu
COPY . /checkout
RUN /checkout/deploy/install.sh packages "${TARGET}" /checkout

FROM ${BASE}
COPY deploy /opt/deploy
RUN /opt/deploy/install.sh system
COPY --from=packages /opt/mesh-transformer /opt/mesh-transformer
ENV PATH=/opt/mesh-transformer/bin:${PATH} PYTHONUNBUFFERED=1
USER mesh
WORKDIR /data
EXPOSE 5000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --start-interval=2s CMD ["/opt/deploy/health.sh"]
ENTRYPOINT ["mesh-transformer"]
CMD ["--help"]
