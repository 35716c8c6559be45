"""What stands before a real server: TLS, delays, and certificates."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import threading
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Proxy:
    """Passes bytes to a port of this machine, behind TLS or late where that is wanted."""

    def __init__(
        self,
        port: int,
        reply_delay_s: float = 0.0,
        piece: int = 2**16,
        pem: Path | None = None,
        clients: Path | None = None,
    ) -> None:
        """Each ``piece`` bytes of a reply come ``reply_delay_s`` late.

        With ``pem`` it speaks TLS, with ``clients`` only to those with that certificate.
        """
        self._upstream = port
        self._delay_s = reply_delay_s
        self._piece = piece
        self._tls: ssl.SSLContext | None = None
        if pem is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(pem)
            if clients is not None:
                self._tls.verify_mode = ssl.CERT_REQUIRED
                self._tls.load_verify_locations(clients)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.05)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream, up = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            await asyncio.gather(
                self._pump(reader, up, 0.0, 2**16),
                self._pump(upstream, writer, self._delay_s, self._piece),
            )
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            for end in (up, writer):
                end.transport.abort()
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, piece: int
    ) -> None:
        while data := await reader.read(piece):
            await asyncio.sleep(delay_s)
            writer.write(data)
            await writer.drain()
        writer.close()


def self_signed(folder: Path, host: str = "127.0.0.1") -> Path:
    """A file with a fresh certificate for this machine and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "prefix cache test")])
    now = datetime.now().astimezone()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path
