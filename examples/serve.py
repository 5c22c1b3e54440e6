"""A classifier behind HTTP, with the standard library alone; one thread per request, one model for all of them.

    python examples/serve.py net.safetensors --port 8000
    curl --data-binary @photo.png http://127.0.0.1:8000/

The body of a POST is an image file; the answer is JSON: {"class": "cats", "probability": 0.93}. Calls of one model take turns, so threads gain while
they read images, not while they compute. For more requests per second start one process per GPU (`mode="auto"`, `nbcnn.use_device`), or per core.
"""

from __future__ import annotations

import argparse
import io
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

import nbcnn

LARGEST = 20 << 20
"""Bytes of a request; more are refused unread."""


def pixels(file: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """An image file as the network takes it, uint8 (C, H, W)."""
    channels, height, width = shape
    with Image.open(io.BytesIO(file), formats=["PNG", "JPEG"]) as image:
        held = np.asarray(image.convert("L" if channels == 1 else "RGB").resize((width, height)), np.uint8)
    return held.reshape(height, width, channels).transpose(2, 0, 1)


def server(model: nbcnn.Model, port: int) -> ThreadingHTTPServer:
    """A server on this machine that answers with the most probable class of an image; `serve_forever` starts it."""
    shape = model.net.input_shape
    names = model.classes or [str(number) for number in range(model.net.classes)]

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 < length <= LARGEST:
                self.send_error(413, f"send an image file of at most {LARGEST >> 20} MB")
                return
            try:
                image = pixels(self.rfile.read(length), shape)
            except (OSError, Image.DecompressionBombError):
                self.send_error(400, "the body is no PNG or JPEG file")
                return
            found = model.predict_proba(image)[0]
            body = json.dumps({"class": names[found.argmax()], "probability": round(float(found.max()), 4)}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing per request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Answer)


def main() -> None:
    """Serve the model of the command line."""
    flags = argparse.ArgumentParser(description="Serve a classifier over HTTP.")
    flags.add_argument("model", help="file of Model.save, or run folder")
    flags.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1 (default 8000)")
    given = flags.parse_args()
    with nbcnn.load(given.model) as model, server(model, given.port) as made:
        print(f"http://127.0.0.1:{made.server_port}/", flush=True)
        made.serve_forever()


if __name__ == "__main__":
    main()
