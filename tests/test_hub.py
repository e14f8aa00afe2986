"""Names of models: found here first, and looked for on a hub only if that answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from latte.errors import UserError
from latte.hub import require_findable


@pytest.fixture
def hub():
    """A server that knows nothing, as a hub does that wants a login."""

    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(401)

        def log_message(self, *given):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_hub_is_asked_only_for_names_it_can_have(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", hub)
    require_findable("owner/name")
    require_findable("name")
    with pytest.raises(UserError, match=r"there is no folder \./name: expected a run's"):
        require_findable("./name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="there is no folder owner/name, and the hub"):
        require_findable("owner/name")
    (tmp_path / "cache" / "models--owner--name").mkdir(parents=True)
    require_findable("owner/name")
    require_findable("smollm2-135m")
    require_findable(str(tmp_path))
