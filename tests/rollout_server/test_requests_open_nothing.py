"""No request makes a server open a file or an address: every way in which ms-swift would, on server and merger."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_rollout_server import FakeRolloutServer
from live_merger import live_merger
from live_server import GREEDY, RunningServer, base64_png, image_request, picture, text_request

from swift_stage2 import wire
from swift_stage2.errors import SampleError
from swift_stage2.servers.request_checks import RequestLimits, check_conversations

TEMPLATE_ARGUMENTS = ("image", "image_url", "video", "chat_template", "resized_height", "max_pixels")


def ways_to_name(place: str) -> dict[str, dict[str, Any]]:
    """A conversation for every way in which ms-swift 4.6 takes a path or an address from a request."""
    tag = f"<img>{place}</img>"
    image = image_request()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": tag})}}
    hidden = json.loads(json.dumps(call))
    hidden["function"]["arguments"] = hidden["function"]["arguments"].replace("<", "\\u003c")
    ways: dict[str, Any] = {
        "tag": text_request(f"look {tag} here"),
        "tag in capitals": text_request(tag.upper()),
        "tag, several messages": {
            "messages": [{"role": "system", "content": tag}, {"role": "user", "content": "a"}]
        },
        "tag beside an image": {**image, "messages": [{"role": "user", "content": f"<image>{tag}"}]},
        "video tag": text_request(f"<video>{place}</video>"),
        "audio tag": text_request(f"<audio>{place}</audio>"),
        "tool call": {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]},
                                   {"role": "user", "content": "b"}]},
        "escaped tool call": {"messages": [{"role": "assistant", "content": "x", "tool_calls": [hidden]},
                                           {"role": "user", "content": "b"}]},
        "tool message": {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": tag},
                                      {"role": "user", "content": "b"}]},
        "tools": {**text_request(), "tools": [json.dumps({"function": {"name": tag}})]},
        "objects": {**image, "objects": {"ref": [tag], "bbox": [[1, 2, 3, 4]]}},
        "images": {**image, "images": [place]},
        "file address": {**image, "images": [f"file://{place}"]},
        "address that ends as base64": {**image, "images": [f"{place};base64,{base64_png(picture())}"]},
        "image as a record": {**image, "images": [{"path": place, "bytes": None}]},
        "images as text": {**image, "images": place},
        "videos": {**text_request(), "videos": [place]},
        "audios": {**text_request(), "audios": [place]},
        "content list": {"messages": [{"role": "user", "content": [{"type": "image", "image": place}]}]},
        "content list, address": {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": place}}]}]
        },
        "answer of a rejected row": {**image, "rejected_images": [place]},
    }  # fmt: skip
    for key in TEMPLATE_ARGUMENTS:
        ways[f"template argument {key}"] = {**image, "chat_template_kwargs": {key: place}}
    return ways


WAYS = tuple(ways_to_name("/"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.png"
    picture(30).save(path)
    return path


def error_of(reply: httpx.Response) -> str:
    assert reply.status_code in (422, 500), (reply.status_code, reply.text[:200])
    body = reply.json()
    assert body["detail"]
    assert "\n" not in body["detail"]
    return str(body["detail"])


@pytest.mark.parametrize("way", WAYS)
def test_a_file_named_in_a_request_is_neither_read_nor_told_to_exist(
    server: RunningServer, secret: Path, way: str
) -> None:
    missing = secret.with_name("nonexs.png")
    told = [error_of(server.post_infer([ways_to_name(str(path))[way]])) for path in (secret, missing)]
    assert told[0].replace("secret", "nonexs") == told[1]  # one that is long is cut


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """An address, and the paths that were asked for there."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}/x.png", asked
        listener.shutdown()


def test_no_address_named_in_a_request_is_asked(server: RunningServer) -> None:
    with listening() as (address, asked):
        for conversation in ways_to_name(address).values():
            error_of(server.post_infer([conversation]))
    assert asked == []


def test_the_merger_passes_none_of_them_on(secret: Path) -> None:
    with FakeRolloutServer() as upstream, live_merger(upstream) as merger:
        for conversation in ways_to_name(str(secret)).values():
            body = {"infer_requests": [text_request(), conversation], "request_config": GREEDY}
            reply = merger.post(wire.INFER, body)
            error_of(reply)
            assert [each["index"] for each in reply.json()["failures"]] == [1]
            # a body that cannot be merged goes alone, and not unseen
            error_of(merger.post(wire.INFER, body | {"request_config": {"seed": "x"}}))
        lora = {"infer_requests": [text_request()], "adapter_request": {"name": "a", "path": "/x"}}
        assert "adapter_request" in error_of(merger.post(wire.INFER, lora))
        good = {"infer_requests": [text_request("fine")], "request_config": GREEDY}
        assert merger.post(wire.INFER, good).status_code == 200
        assert [call.texts for call in upstream.infer_calls] == [["fine"]]


def test_a_sealed_template_opens_nothing_even_where_no_check_came_before(
    server: RunningServer, secret: Path
) -> None:
    """The check is in front; behind it the template itself takes pictures only."""
    template = server.engine.generator.template
    tagged = template.encode(text_request(f"<img>{secret}</img>"))
    assert "pixel_values" not in tagged
    with pytest.raises(SampleError, match="by name"):
        template.encode({**image_request(), "images": [str(secret)]})


def test_what_a_learner_sends_passes() -> None:
    data_url = "data:image/png;base64," + base64_png(picture())
    thinking = {**text_request("1 < 2 <image"), "chat_template_kwargs": {"enable_thinking": False}}
    told = {
        **image_request(text='<ref-object> {"a": "\\u003cb>"} <video> <bbox>'),
        "images": [data_url],
        "uuid": "7",
    }
    assert check_conversations([image_request(), text_request(), thinking, told], RequestLimits()) == {}


@pytest.mark.slow
def test_a_checkpoint_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """In a process of its own: the refusal is for the whole process."""
    import subprocess
    import sys

    model, mark = tmp_path / "model", tmp_path / "it-ran"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}, "architectures": ["Own"]})
    )
    code = f"from transformers import PretrainedConfig\nopen({str(mark)!r}, 'w')\n"
    (model / "own.py").write_text(code + "class Own(PretrainedConfig):\n    model_type = 'own'\n")
    command = [sys.executable, "-m", "swift_stage2", "rollout", str(model), "--port", "0", "--device", "cpu",
               "--model-type", "qwen2", "--template", "qwen"]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 2
    assert not mark.exists()
    assert "--trust-remote-code" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert "trust_remote_code=True" not in ended.stdout + ended.stderr, "what ms-swift says, and is not so"
