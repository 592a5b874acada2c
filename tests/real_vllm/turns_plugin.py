"""A scheduler for the tests of this folder, on both servers: what a request says first decides how it goes on."""

from __future__ import annotations

from typing import Any

from swift.rollout import MultiTurnScheduler, multi_turns

GO_ON, TWICE, PICTURE = "go on", "answer twice", "bring a picture"
AGAIN, TIP = "Look again at the image.", "But wait,"
LAST_TURN = 3


class Mixed(MultiTurnScheduler):
    """Asks again, also behind an answer that was cut off, as a canary's is; or puts words into the model's mouth."""

    async def run(self, request: Any, config: Any, **options: Any) -> Any:
        first = request.messages[-1]["content"]
        output = await super().run(request, config, **options)
        if TWICE in first:
            return [output, output]
        if PICTURE in first:
            output.rollout_infos["images"] = ["aGk="]
        return output

    def check_finished(self, request: Any, choice: Any, turn: int) -> bool:
        return turn >= LAST_TURN

    def step(self, request: Any, choice: Any, turn: int) -> dict[str, Any]:
        if GO_ON not in request.messages[0]["content"]:
            request.messages.append({"role": "user", "content": AGAIN})
            return {"infer_request": request}
        ids = list(choice.token_ids)
        if choice.finish_reason == "stop":
            ids.pop()
        log_probs = self._extract_logprobs_from_choice(choice)[: len(ids)]
        tip = self.tokenizer.encode(TIP, add_special_tokens=False)
        request.messages[-1]["content"] = self.tokenizer.decode(ids) + TIP
        mask = [1] * len(ids) + [0] * len(tip)
        extended = {"response_token_ids": ids + tip, "response_loss_mask": mask}
        return {"infer_request": request, "rollout_logprobs": log_probs, **extended}


multi_turns["mixed"] = Mixed
