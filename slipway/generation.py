"""Answers of a model to prompts, before, during and after training."""

import contextlib
from collections.abc import Iterator
from typing import Any

from slipway.errors import InputError
from slipway.placement import computes_on
from slipway.tokenizers import end_of_turn


def answers(
    model: Any,
    tokenizer: Any,
    prompts: list[dict[str, Any]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    synced_gpus: bool = False,
) -> list[str]:
    """One answer a prompt: {"messages": [...]} is a chat that the model continues, {"text": "..."} a text.

    Greedy unless `temperature` is above 0. One prompt at a time, so that no padding changes an answer.
    `model` is the unwrapped transformers or peft model, on any device; its mode is the same afterwards. Under
    ZeRO-3 every rank calls this with the same prompts and `synced_gpus=True`, so that ranks that stop early
    keep gathering for the others. Raises InputError for a prompt longer than the model's context.
    """
    import torch  # here, as the launcher imports this module too

    stop = sorted({*end_of_turn(tokenizer), *_as_list(model.generation_config.eos_token_id)})
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    replies = []
    device = computes_on(model)
    gpus = [device] if device.type == "cuda" else []
    with _answering(model), torch.random.fork_rng(gpus):
        torch.manual_seed(seed)
        for prompt in prompts:
            ids = encode(tokenizer, prompt)
            output = model.generate(
                input_ids=torch.tensor([ids], device=device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
                max_new_tokens=min(max_new_tokens, _room(model.config, len(ids))),
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=stop,
                use_cache=True,
                synced_gpus=synced_gpus,
                **sampling,
            )
            replies.append(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip())
    return replies


def encode(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    """Token ids of a prompt; a chat ends where the assistant's answer begins."""
    if "messages" not in prompt:
        return tokenizer(prompt["text"]).input_ids
    text = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def prompt_text(prompt: dict[str, Any]) -> str:
    """A prompt as a person reads it: the text, or what was said last in the chat."""
    return prompt["messages"][-1]["content"] if "messages" in prompt else prompt["text"]


def _room(config: Any, used: int) -> int:
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return 2**31
    if used >= context:
        raise InputError(f"the prompt has {used} tokens, the model's context ends at {context}", "shorten it")
    return context - used


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


@contextlib.contextmanager
def _answering(model: Any) -> Iterator[None]:
    """Evaluation mode (which lifts gradient checkpointing too), no gradients; then all modes as before."""
    import torch

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # Not inference_mode: ZeRO-3 counts versions of the tensors that it gathers.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def forget_order_of_layers(engine: Any) -> None:
    """After generating layer by layer under ZeRO-3: DeepSpeed has learned in which order weights are needed, and would
    prefetch the LM head's in TRL's next forward, which gathers it by itself and stops at a weight in flight."""
    engine.empty_partition_cache()
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
