"""A server on this machine, in place of the mirrors."""

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves ``folder``; ``requests`` holds the requested paths."""

    def __init__(self, folder):
        self.requests = []

        class Handler(SimpleHTTPRequestHandler):
            def log_message(handler, *args):
                self.requests.append(handler.path)

        handler = functools.partial(Handler, directory=str(folder))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
