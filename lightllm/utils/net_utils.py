"""Addresses and ports."""

import socket


class PortTaken(OSError):
    """The address cannot be bound; the message names it."""


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet; port 0 takes a free one. Raises PortTaken.

    SO_REUSEADDR passes over connections that an ended server has left in TIME_WAIT. It is taken back until `adopt`,
    since two sockets that both carry it could be bound to one port as long as neither listens.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}") from error
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return listener


def adopt(fd: int) -> socket.socket:
    """The socket of `bind` in the process that is about to listen on it.

    Without SO_REUSEADDR connections in TIME_WAIT would forbid it to listen, and its own the next server to bind.
    """
    listener = socket.socket(fileno=fd)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener
