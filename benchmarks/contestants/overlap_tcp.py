"""Two processes that send each other as many bytes as a network has gradients, over one TCP connection."""

import socket
import threading

from benchmarks.contestants._serve import compete, rank, timed
from benchmarks.contestants._wide import count_parameters


def connect(address, port):
    """Return a connection of both processes; the first one listens."""
    if rank() == 0:
        with socket.create_server((address, port)) as listener:
            return listener.accept()[0]
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:  # the other process does not listen yet
            continue


def make(model, address, port):
    """Prepare an exchange of the gradients' bytes."""
    connection = connect(address, port)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent, received = bytes(4 * count_parameters(model)), bytearray(4 * count_parameters(model))

    def step():
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        connection.recv_into(received, len(received), socket.MSG_WAITALL)
        sender.join()

    return lambda steps: timed(step, steps), {"bytes": len(sent)}


if __name__ == "__main__":
    compete(make)
