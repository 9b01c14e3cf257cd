"""A model that costs nothing, with a tokenizer and a chat template, for runs that are about the server.

    python benchmarks/tiny_checkpoint.py DIR
    tracklayer serve DIR --load-format dummy --enable-return-routed-experts

Four MoE layers of 16 experts, top-4; weights are the server's to draw (--load-format dummy). Each id of the vocabulary
is a token with a text of its own, so that benchmark clients see text with every token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tracklayer.bench.shapes import SHAPES

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path) -> Path:
    """Write config.json and the tokenizer's files into `folder`, and return it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(["The quick brown fox jumps over the lazy dog. User: hello. Assistant: hi."], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIALS[2], pad_token=SPECIALS[0], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config = SHAPES["tiny"] | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
