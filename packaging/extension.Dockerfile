# Nothing but the files, for CloudNativePG: it mounts the image as a volume into a Postgres 18 or newer,
# of any system and processor. After `make all`:
# docker build -f packaging/extension.Dockerfile .
FROM scratch
COPY pgqueue.control sql/pgqueue--*[0-9].sql /share/extension/
COPY LICENSE /licenses/pgqueue/
