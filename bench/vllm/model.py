# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Models with random weights and a generated tokenizer, for measuring an engine without a download.

::

    python beluga/child.py beluga_bench.vllm.model SIZE FOLDER

This needs torch, transformers and tokenizers.

A size always has the same weights, on every machine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from beluga.child import command

VOCABULARY = 2048
_SPECIAL = ("<s>", "</s>", "<pad>")
_SEED = 20251122


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a Llama model, which determines the size of a block of its KV cache."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    context: int = 16384
    head: int = 0  # the size of a head if it is not hidden / heads

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads

    def token_bytes(self, element_bytes: int = 2) -> int:
        """Return the KV bytes of a token: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


SIZES = {
    "tiny": Size(hidden=256, layers=4, heads=8, kv_heads=4),
    "mid": Size(hidden=1024, layers=12, heads=16, kv_heads=8),
    "wide": Size(hidden=512, layers=24, heads=8, kv_heads=8),
    "broad": Size(hidden=128, layers=8, heads=32, kv_heads=32, head=256),
}
"""``tiny`` is for tests; ``mid`` prefills a few thousand tokens in seconds on two cores. ``wide``
has twice the KV bytes for half of the work, and ``broad`` has 1 GiB of KV for 4,096 tokens.
"""


def model(size: str, python: str = sys.executable) -> Path:
    """Return the folder of a model. If necessary it is made in the environment of ``python``.

    Raises subprocess.CalledProcessError, whose ``stderr`` names what that environment lacks.
    """
    # not resolved, because a venv's python is a link
    prefix = Path(python).absolute().parent.parent
    home = prefix if os.access(prefix, os.W_OK) else Path(tempfile.gettempdir())
    folder = home / f"beluga-model-{size}-{_SEED}"
    if not folder.is_dir():
        words = command("beluga_bench.vllm.model", size, str(folder), python=python)
        with tempfile.TemporaryDirectory() as caches:  # torch would leave its caches behind
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": caches}
            subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return folder


def make(size: Size, folder: Path) -> None:
    """Make the model. The folder appears complete or not at all, and an existing one is not
    changed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".beluga-model-", dir=folder.parent))
    try:
        _make_tokenizer(size, made)
        _make_weights(size, made)
        made.chmod(0o755)
        if not folder.exists():
            made.rename(folder)
    except FileExistsError:  # another process has already made the same model
        pass
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _make_tokenizer(size: Size, folder: Path) -> None:
    """Train byte-level pairs on random words until every token id has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    letters = random.Random(_SEED)  # noqa: S311  the same words every time, no secret
    words = (
        "".join(letters.choices("etaoinshrdlu", k=letters.randint(2, 9))) for _ in range(20000)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        pad_token=_SPECIAL[2],
        model_max_length=size.context,
    ).save_pretrained(folder)


def _make_weights(size: Size, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        max_position_embeddings=size.context,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        # wider than usual, because the logits of random weights are close together
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    """Make a model, with the arguments ``SIZE FOLDER``."""
    name, folder = sys.argv[1:]
    make(SIZES[name], Path(folder))
    print(json.dumps({"model": folder}))


if __name__ == "__main__":
    main()
