"""Device time of whole models' forwards, as they are and with `opkiln.replace` applied.

    python bench/probes/replaced_model.py --out DIR

A transformers Llama of two layers (hidden 4096, 2 x 1024 tokens, bf16) and torchvision's ResNet-50
(32 x 3 x 224 x 224, f16, channels_last), in evaluation. Outputs are compared first; then both are
timed alternately, a forward as one call. The plan's prediction stands beside what was measured.
Writes DIR/replaced_model.json.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import opkiln
import torch
from common import flush_buffer, kernel_times_us, options, provenance, write_json
from opkiln.replacing.gain import Gain

ITERATIONS = 20
TOLERANCE = {torch.bfloat16: 6e-2, torch.float16: 2e-2}  # of the largest logit, through the model

Made = tuple[torch.nn.Module, dict[str, Any], torch.dtype]


def llama() -> Made:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    ids = torch.randint(0, 1024, (2, 1024), device="cuda")
    return model, {"input_ids": ids, "use_cache": False}, torch.bfloat16


def resnet50() -> Made:
    import torchvision

    model = torchvision.models.resnet50().to("cuda", torch.float16)
    x = torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.float16)
    model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))  # type: ignore[attr-defined]
    return model, {"x": x}, torch.float16


MODELS: dict[str, Callable[[], Made]] = {"llama": llama, "resnet50": resnet50}


def logits(out: Any) -> torch.Tensor:
    return (out if isinstance(out, torch.Tensor) else out.logits).float()


def measured_model(make: Callable[[], Made], flush: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    own, inputs, dtype = make()
    own.eval()
    model = copy.deepcopy(own)
    plan = opkiln.replace(model, example=inputs).apply()
    want, got = logits(own(**inputs)), logits(model(**inputs))
    off = float((got - want).abs().max() / want.abs().max())
    gains = [row.gain for row in plan.replaced if isinstance(row.gain, Gain)]
    found: dict[str, Any] = {
        "modules": len(plan.replaced),
        "with_times": len(gains),
        "predicted_saving_us": sum(g.torch_us - g.chosen_us for g in gains),
        "off": off,
        "status": "ok" if off <= TOLERANCE[dtype] else "wrong",
    }
    if found["status"] == "ok":
        calls = [lambda: own(**inputs), lambda: model(**inputs)]
        times = kernel_times_us(calls, flush, ITERATIONS)
        found["own_us"], found["replaced_us"] = map(statistics.median, times)
    return found


def main() -> None:
    given = options(__doc__ or "")
    given.out.mkdir(parents=True, exist_ok=True)
    flush = flush_buffer()
    results = {}
    with torch.no_grad():
        for name in [n for n in MODELS if given.only in n]:
            found = results[name] = measured_model(MODELS[name], flush)
            print(name, " ".join(f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}"
                                 for k, v in found.items()), flush=True)  # fmt: skip
            write_json(given.out / "replaced_model.json", provenance() | {"models": results})


if __name__ == "__main__":
    main()
