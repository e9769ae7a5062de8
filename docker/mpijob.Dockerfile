# The image of mpijob.yaml: Synkhronos, an ssh daemon, with which the MPI Operator starts processes, and the script.
ARG BASE=synkhronos
FROM ${BASE}

# The operator mounts the key for ssh in a folder that all users can write, which sshd refuses by default.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* && mkdir -p /run/sshd \
    && echo 'StrictModes no' > /etc/ssh/sshd_config.d/mpijob.conf \
    && printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n' \
        > /etc/ssh/ssh_config.d/mpijob.conf

COPY train.py /work/
