"""A client of gRPC on the library h2: its headers, messages and pauses are the test's to choose."""

from __future__ import annotations

import socket
import struct
from typing import Any

import h2.config
import h2.connection
import h2.events

INFER = "/inference.GRPCInferenceService/ModelInfer"


def framed(body: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BL", flag, len(body)) + body


class Client:
    """One connection of the library h2's."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="latin-1"))
        self._state.initiate_connection()
        self._headers: dict[int, dict[str, str]] = {}
        self._ended: dict[int, dict[str, str]] = {}
        self._said: dict[int, bytes] = {}
        self._reset: dict[int, int] = {}
        self._goodbye: str | None = None

    def close(self) -> None:
        self._socket.close()

    def ask(self, pieces: list[bytes], path: str = INFER, **headers: str) -> tuple[dict[str, str], bytes]:
        """Everything that the answer's headers and trailers say, and its bytes."""
        number = self.begin(path, **headers)
        for piece in pieces:
            self.send(number, piece)
        self._state.end_stream(number)
        return self.answer(number)

    def begin(self, path: str = INFER, **headers: str) -> int:
        number = int(self._state.get_next_available_stream_id())
        told = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        told["content-type"] = "application/grpc"
        told.update({name.replace("__", ":").replace("_", "-"): value for name, value in headers.items()})
        self._state.send_headers(number, list(told.items()))
        return number

    def send(self, number: int, piece: bytes, *, end_stream: bool = False) -> None:
        """Some of a message; it leaves when an answer is waited for."""
        for at in range(0, max(1, len(piece)), 16384):
            is_last = at + 16384 >= len(piece)
            self._state.send_data(number, piece[at : at + 16384], end_stream=end_stream and is_last)

    def cancel(self, number: int) -> None:
        """Break a call off; this leaves after what was sent before."""
        self._state.reset_stream(number)

    def leave(self) -> None:
        """What was begun and sent leaves now, and nothing is waited for."""
        self._socket.sendall(self._state.data_to_send())

    def answer(self, number: int) -> tuple[dict[str, str], bytes]:
        self._socket.sendall(self._state.data_to_send())
        while number not in self._ended and number not in self._reset:
            if self._goodbye is not None:
                return {"goodbye": self._goodbye}, b""
            received = self._socket.recv(65536)
            assert received, "the connection ended"
            for event in self._state.receive_data(received):
                self._note(event)
            self._socket.sendall(self._state.data_to_send())
        return self._ended.get(number, {"reset": str(self._reset.get(number))}), self._said.get(number, b"")

    def _note(self, event: Any) -> None:
        match event:
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                told = {str(name): str(value) for name, value in event.headers}
                self._headers.setdefault(event.stream_id, {}).update(told)
            case h2.events.DataReceived():
                self._said[event.stream_id] = self._said.get(event.stream_id, b"") + event.data
                self._state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self._ended[event.stream_id] = self._headers[event.stream_id]
            case h2.events.StreamReset():
                self._reset[event.stream_id] = event.error_code
            case h2.events.ConnectionTerminated():
                self._goodbye = (event.additional_data or b"").decode()
