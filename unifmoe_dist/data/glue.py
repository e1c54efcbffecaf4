"""Five tasks of GLUE (Wang et al., 2019) under the paper's protocol: CoLA, MRPC, QNLI, MNLI and RTE.

The official training split trains. GLUE publishes no labels of its test splits, so as in the paper the official
validation split both selects the epoch and is reported: `test` is `validation`, and a test score is the best epoch's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from unifmoe_dist.data.encoders import GLUE_BACKBONE, Encoder
from unifmoe_dist.data.glue_files import FORMATS, Examples, read_glue
from unifmoe_dist.data.limits import check_tokens, longest_input
from unifmoe_dist.data.metrics import ACCURACY, ACCURACY_AND_F1, MATTHEWS
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.data.text import EncodedTexts, PadCollator

METRICS = {"cola": MATTHEWS, "mrpc": ACCURACY_AND_F1, "qnli": ACCURACY, "mnli": ACCURACY, "rte": ACCURACY}


def glue_task(
    name: str, root: str | Path | None = None, encoder: Encoder | None = None, dropout: float = 0.1
) -> TaskData:
    """One task, tokenised to at most 128 tokens, or fewer if the model takes fewer, and padded batch by batch.

    Args:
        name: cola, mrpc, qnli, mnli (matched) or rte.
        root: Folder of the data, or its parent, in any layout of `read_glue`; None reads the hub.
        encoder: Backbone and tokenizer; BERT-large-cased from the hub by default.
        dropout: Dropout of the backbone's embeddings and outputs.

    Returns:
        One training environment; `collate` gives `input_ids`, `attention_mask` and, where the tokenizer uses them,
        `token_type_ids`, each `(N, T) int64`; the model returns an object with `.logits (N, classes)`.

    Raises:
        UserError: data, tokenizer or (from `build_model`) weights are missing or unreadable.
    """
    encoder = encoder or Encoder(GLUE_BACKBONE)
    train, validation = read_glue(name, root)
    tokenizer, config = encoder.tokenizer(), encoder.config()
    longest = longest_input(config, tokenizer, encoder.source)

    def encoded(part: Examples) -> EncodedTexts:
        first, *second = zip(*part.texts, strict=True)
        return EncodedTexts(first, part.labels, tokenizer, second[0] if second else None, longest)

    training, validating, classes = encoded(train), encoded(validation), len(FORMATS[name].classes)
    types = "token_type_ids" in tokenizer.model_input_names
    check_tokens(config, [training, validating], encoder.source)
    return TaskData(
        name=name,
        num_classes=classes,
        train=[training],
        validation=[validating],
        test=[validating],
        environments=(name,),
        collate=PadCollator(int(tokenizer.pad_token_id), types),
        build_model=partial(encoder.classifier, classes, dropout),
        metric=METRICS[name],
    )
