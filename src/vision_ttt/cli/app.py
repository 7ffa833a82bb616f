"""`vision-ttt app [CHECKPOINT…]`: a page that shows what models see in a picture."""

from __future__ import annotations

import ipaddress
import socket
import threading

import jsonargparse

from vision_ttt.app.catalogue import Catalogue
from vision_ttt.app.page import build_page, serve
from vision_ttt.cli.device import find_device
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.errors import UserError


def run(arguments: jsonargparse.Namespace) -> int:
    """Serve the page until interrupted."""
    host, port = arguments.host, arguments.port
    _check_free(host, port)
    catalogue = Catalogue(arguments.models, device=find_device(arguments.device))
    page = build_page(catalogue)
    serve(page, host, port)
    console = plain_console()
    shown = f"[{host}]" if ":" in host else host
    console.say(f"http://{shown}:{port}, until Ctrl-C")
    if not _is_loopback(host):
        console.say("The page has no password: every machine that reaches it can run models here.")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        page.close(verbose=False)
    return 0


def _check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before the models are looked at."""
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except (OSError, UnicodeError) as error:  # an unknown host, and what cannot be one
        reason = getattr(error, "strerror", error)
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; name others by --host and --port"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
