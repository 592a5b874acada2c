"""A stand-in rollout server: one engine process that outlives its parent and ignores SIGTERM, as vLLM's do.

usage: stand_in_server.py PORT [die | mute | deaf]
"""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port, manner = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "serve"
engine = "import signal; signal.signal(15, signal.SIG_IGN); print('engine runs', flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", engine], start_new_session=True)
print(f"server process {os.getpid()}", flush=True)
if manner == "die":
    sys.exit("no such model")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"mute": 503}.get(manner, 200))
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/exit/":
            os._exit(9)
        choice = {"message": {"content": "a"}, "finish_reason": "length", "token_ids": [1]}
        reply = [
            {"response": {"choices": [choice], "prompt_token_ids": [1]}}
            for _ in request.get("infer_requests", [])
        ]
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        return


# A deaf one listens elsewhere, as a stock server does whose port is taken.
HTTPServer(("127.0.0.1", 0 if manner == "deaf" else port), Handler).serve_forever()
