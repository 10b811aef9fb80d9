"""Models of the transformers library, tiny and untrained: every module observed, the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline

from .reference import equal

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokens() -> Tensor:
    return torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))


def pixels() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def text(**more: Any) -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens(), **more}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), text(attention_mask=mask)


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), text()


def llama_with_checkpoints() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = llama()
    model.gradient_checkpointing_enable()
    return model, inputs | {"use_cache": False}


def mixture_of_experts() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=3)
    return transformers.MixtralForCausalLM(config), text()


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), text()


def vision() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {key: SMALL[key] for key in list(SMALL)[1:5]}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels(), "labels": torch.tensor([0, 1])}


def state_space() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config), text()


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    make.__name__: make for make in (bert, llama, llama_with_checkpoints, mixture_of_experts, t5, vision, state_space)
}


def step(name: str, observe: Callable[[nn.Module], Any]) -> list[Any]:
    """One training step; ``observe`` is given the model before it."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    observe(model)
    torch.manual_seed(1)
    output = model(**inputs)
    output.loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [output.loss.detach(), output.logits.detach(), grads, list(model.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("name", MODELS)
def test_hooks_on_every_module_change_no_bit(name: str) -> None:
    seen: Counter[str] = Counter()

    def observe(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.ModuleList):  # is never called
                continue
            hookline.register_forward_pre_hook(module, lambda *_: seen.update(["input"]))
            hookline.register_forward_hook(module, lambda *_: seen.update(["output"]))
            hookline.register_backward_pre_hook(module, lambda *_: seen.update(["grad_output"]))
            hookline.register_backward_hook(module, lambda *_: seen.update(["grad_input"]))

    bare = step(name, lambda model: None)
    assert equal(step(name, observe), bare)
    assert seen["grad_input"] == seen["grad_output"] > 10 and seen["input"] >= seen["output"] > 10


@pytest.mark.parametrize("name", MODELS)
def test_a_recording_of_every_module_changes_no_bit(name: str) -> None:
    recorders = []

    def observe(model: nn.Module) -> None:
        recorders.append(hookline.record(model, "**", ports=("input", "output", "grad_input", "grad_output")))
        recorders[0].__enter__()

    bare = step(name, lambda model: None)
    observed = step(name, observe)
    recorders[0].__exit__(None, None, None)
    assert equal(observed, bare)
    assert {event.port for event in recorders[0].recording} == {"input", "output", "grad_input", "grad_output"}


def test_a_generation_with_a_cache_gives_the_same_tokens_and_every_step_is_seen() -> None:
    torch.manual_seed(0)
    model, _ = llama()
    model.eval()

    def generate() -> Tensor:
        return model.generate(tokens(), max_new_tokens=4, do_sample=False)

    bare = generate()
    with hookline.record(model, "lm_head") as recording:
        observed = generate()
    assert equal(observed, bare)
    new = bare.shape[1] - tokens().shape[1]
    assert [call.output.shape for call in recording["lm_head"].calls] == [(2, 1, 50)] * new
