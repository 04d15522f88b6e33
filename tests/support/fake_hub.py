"""A server on loopback that answers what `huggingface_hub` asks of the Hub for a push and a pull."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories as dictionaries of files; `broken`: commits are refused; `asked`: what was requested."""

    def __init__(self):
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.broken = False
        self.endpoint = ""


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    hub: Hub

    def log_message(self, *arguments):
        """Say nothing."""

    def answer(self, status, body=b"", **headers):
        """Send a response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": len(data),
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self):
        """Read the body of a request, in chunks or whole."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def handle_one(self):
        """Answer any method."""
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        body = self.body()
        hub.asked.append(f"{self.command} {path}")
        writes = path.startswith("/api/repos/create") or "/commit/" in path or "/preupload/" in path
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials"})
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            there = name in hub.repositories
            hub.repositories.setdefault(name, {".gitattributes": b""})
            hub.private.setdefault(name, bool(asked.get("private")) or asked.get("visibility") == "private")
            return self.answer(409 if there else 200, {"url": f"{hub.endpoint}/{name}", "error": "exists"})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if parts[0] == "lfs":
            hub.objects[parts[1]] = body
            return self.answer(200)
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2]).removesuffix(".git")
        if name not in hub.repositories:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        files = hub.repositories[name]
        if path.endswith("/info/lfs/objects/batch"):
            found = [
                {**one, "actions": {"upload": {"href": f"{hub.endpoint}/lfs/{one['oid']}", "header": {}}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": found})
        if "/preupload/" in path:
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith("safetensors") else "regular"}
                for f in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": [{**one, "shouldIgnore": False} for one in modes]})
        if "/commit/" in path:
            if hub.broken:
                return self.answer(500, {"error": "the disk is full"})
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    files[line["value"]["path"]] = hub.objects[line["value"]["oid"]]
            return self.answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.endpoint}/{name}"})
        if parts[:2] == ["api", "models"]:
            if len(parts) > 4 and parts[-1] not in ("main", COMMIT):
                return self.answer(404, {"error": "Invalid rev"}, X_Error_Code="RevisionNotFound")
            siblings = [{"rfilename": file} for file in files]
            return self.answer(200, {"id": name, "sha": COMMIT, "siblings": siblings, "private": hub.private[name]})
        if len(parts) > 4 and parts[2] == "resolve" and "/".join(parts[4:]) in files:
            data = files["/".join(parts[4:])]
            tag = hashlib.sha256(data).hexdigest()
            return self.answer(200, data, ETag=f'"{tag}"', X_Repo_Commit=COMMIT)
        return self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_one


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """Serve until the block ends."""
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub})) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
