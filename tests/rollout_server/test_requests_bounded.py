"""One request costs little, whatever it holds: refused before it is decoded, tried once, forgotten with its caller."""

from __future__ import annotations

import base64
import io
import itertools
import json
import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from builders import ODD_VALUES
from live_server import (
    CALL_TIMEOUT_S,
    RunningServer,
    base64_png,
    hollow_png,
    image_request,
    picture,
    serve,
    text_request,
)
from PIL import Image
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.errors import SampleError
from swift_stage2.rollout_server.engine import GenerationRequest, JobAborted
from swift_stage2.rollout_server.swift_generator import decode_images
from swift_stage2.servers.image_opening import FORMATS, open_image
from swift_stage2.servers.request_checks import RequestLimits, check_conversations

SMALL = RequestLimits(max_body_mib=0.25, max_megapixels=0.03)


@pytest.fixture(scope="module")
def strict(loaded_engine: Any) -> Iterator[RunningServer]:
    with serve(loaded_engine, limits=SMALL) as server:
        yield server


def with_image(content: bytes) -> dict[str, Any]:
    return image_request() | {"images": [base64.b64encode(content).decode()]}


@pytest.mark.parametrize("side", [9000, 13300, 60000])
def test_a_small_file_of_many_pixels_is_refused_by_its_header(server: RunningServer, side: int) -> None:
    content = hollow_png(side, side) if side < 20000 else hollow_png(8, 8).replace(
        b"\0\0\0\x08\0\0\0\x08", side.to_bytes(4) * 2
    )  # fmt: skip
    assert len(content) < 40_000
    reply = server.post_infer([text_request(), with_image(content)])
    assert reply.status_code == 500
    assert [each["index"] for each in reply.json()["failures"]] == [1]
    assert server.engine.status().num_waiting == 0


def test_pictures_are_shrunk_one_by_one_as_the_template_would(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, limit = server.engine.generator, 20_000
    request = GenerationRequest(
        {**image_request(), "images": [base64_png(picture(shade, 640)) for shade in (10, 200)]}
    )
    template = SimpleNamespace(max_pixels=limit)
    shrunk = decode_images(request, lambda: False, template)
    assert all(image.width * image.height <= limit for image in shrunk)
    whole = decode_images(request, lambda: False, SimpleNamespace(max_pixels=None))
    monkeypatch.setattr(generator.template, "max_pixels", limit)
    prompts = []
    for images in (whole, shrunk):
        inputs = generator.template.encode({**request.conversation, "images": images})
        prompts.append((inputs["input_ids"], inputs["pixel_values"].tolist()))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("name", ["EPS", "TGA", "PCX", "SGI", "ICO", "PDF"])
def test_a_format_that_is_not_on_the_list_is_never_decoded(name: str) -> None:
    stream = io.BytesIO()
    picture().save(stream, name)
    with pytest.raises(SampleError, match="must be PNG"):
        open_image(stream.getvalue())


@pytest.mark.parametrize(
    ("conversation", "told"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * 257}, "256 messages"),
        (text_request("a" * 1_000_001), "1,000,000 characters"),
        ({**image_request(), "images": [base64_png(picture(size=9))] * 65}, "64 images"),
        ({**image_request(), "images": [base64_png(picture())] * 3}, "--max-megapixels"),
    ],
)
def test_every_limit_of_a_conversation_is_told(conversation: dict[str, Any], told: str) -> None:
    (fault,) = check_conversations([conversation], SMALL).values()
    assert told in str(fault)


def test_a_call_that_is_too_large_is_413_and_half_of_it_may_pass(strict: RunningServer) -> None:
    for requests, word in (([{}] * 4097, "conversations"), ([image_request(text="x" * 90_000)] * 3, "bytes"),
                           ([image_request()] * 24, "megapixels")):  # fmt: skip
        reply = strict.post_infer(requests)
        assert reply.status_code == 413, reply.text
        assert word in reply.json()["detail"]
        assert "\n" not in reply.json()["detail"]
    assert strict.post_infer([text_request()] * 3, max_tokens=1).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_caller_with_too_large_a_body_hears_of_it_while_it_still_sends(
    strict: RunningServer, chunked: bool
) -> None:
    parts = [b"x" * 65_536] * 24
    content: Any = iter(parts) if chunked else b"".join(parts)
    assert strict.http.post(wire.INFER, content=content).status_code == 413


def test_encoding_ends_at_the_next_image_once_the_caller_has_gone(server: RunningServer) -> None:
    answers = iter([False, True])
    request = GenerationRequest({**image_request(), "images": [base64_png(picture())] * 9})
    with pytest.raises(JobAborted):
        server.engine.generator.encode_row(request, lambda: next(answers))


ONE_REQUEST = {"infer_requests": [text_request()], "request_config": {"max_tokens": 1}}
GOOD_BODIES: dict[str, Any] = {
    wire.INFER: ONE_REQUEST,
    wire.WEIGHTS: {"run_id": "a", "version": 1, "timeout_s": 5.0, "manifest": [1], "way": "disk"},
    wire.INSTALL: {"run_id": "a", "version": 1, "checksums": {"a": "0"}},
}
NO_BODIES = (
    b"", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}", "{}".encode("utf-16"), b"NaN", b"1" * 5000, b"null",
    b"[]", b'"x"', b'{"\\ud800": 1}', b"[" + b"0," * 2**20 + b"0]",
)  # fmt: skip


def odd_bodies(path: str) -> Iterator[bytes]:
    yield from NO_BODIES
    good = GOOD_BODIES[path]
    for key, odd in itertools.product(good, ODD_VALUES):
        yield json.dumps({**good, key: odd}).encode()
    if path == wire.INFER:
        for key, odd in itertools.product(
            ("messages", "images", "tools", "objects", "data_dict"), ODD_VALUES
        ):
            yield json.dumps({**good, "infer_requests": [{**text_request(), key: odd}]}).encode()


@pytest.mark.parametrize("path", GOOD_BODIES)
def test_no_body_brings_a_route_to_an_exception_of_its_own(
    server: RunningServer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """What a message may hold is ``tests/test_wire.py``'s; here, that every route reads by it."""
    with caplog.at_level(logging.WARNING):
        for raw in odd_bodies(path):
            reply = server.http.post(path, content=raw)
            if reply.status_code != 200:
                detail = reply.json()["detail"]  # "Internal Server Error" is no JSON
                assert "\n" not in detail
                assert len(detail) < 2000, (raw[:200], detail[:300])
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert server.http.get(wire.HEALTH).status_code == 200


def test_callers_that_vanish_at_any_byte_leave_no_traceback_and_no_work(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    raw = json.dumps(
        {"infer_requests": [image_request()] * 8, "request_config": {"max_tokens": 2000}}
    ).encode()
    host, port = server.base_url.removeprefix("http://").split(":")
    head = f"POST /infer/ HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with caplog.at_level(logging.WARNING):
        for path in (b"/infer/", b"/stage2/install/", b"/reset_prefix_cache/"):
            for num_bytes in (0, 1, len(raw) // 2, len(raw) - 1, len(raw)):
                with socket.create_connection((host, int(port)), timeout=CALL_TIMEOUT_S) as caller:
                    caller.sendall(head.replace(b"/infer/", path) + raw[:num_bytes])
        wait_for(lambda: server.engine.status().num_waiting + server.engine.status().num_running == 0)
        assert server.http.get(wire.HEALTH).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_broken_files_of_every_format_are_sample_errors() -> None:
    """Cut and changed at many places; Pillow's decoders raise many kinds of errors."""
    for name in FORMATS:
        stream = io.BytesIO()
        picture(size=40).save(stream, name)
        whole = stream.getvalue()
        for place in range(0, len(whole), max(1, len(whole) // 40)):
            for content in (whole[:place], whole[:place] + b"\xff\xff" + whole[place + 2 :]):
                fault = check_conversations([with_image(content)], RequestLimits())
                assert all(isinstance(error, SampleError) for error in fault.values())
    assert Image.MAX_IMAGE_PIXELS is not None
