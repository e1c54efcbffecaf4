"""A BERT in Hugging Face's Trainer with DeepSpeed.

python examples/transformers_trainer.py                                           one process
deepspeed --num_gpus 4 examples/transformers_trainer.py --zero 3                  data parallel on GPUs, ZeRO 1, 2 or 3
DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 examples/transformers_trainer.py    the same on CPU ranks
"""

import argparse
import inspect
import os

from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from unifmoe_dist import diversity_loss, upcycle
from unifmoe_dist.data.acceptability import encoder_path, labelled_sentences
from unifmoe_dist.leaving import leave


class GramTrainer(Trainer):
    """Adds the Gram loss of the routers: once per step, whatever the head, the accumulation and the ranks."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # Trainer takes a head's loss for this micro-batch's share of the whole step's if its forward has **kwargs. That
        # holds where the head calls `loss_function`; other heads take the micro-batch's mean, whatever they are told.
        head = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model  # below PEFT
        if "loss_function" not in inspect.unwrap(type(head).forward).__code__.co_names:
            self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            share = self.compute_loss_func or (self.model_accepts_loss_kwargs and num_items_in_batch is not None)
            batches = self.current_gradient_accumulation_steps if share else 1  # else Trainer divides the sum by them
            loss = loss + 0.01 * diversity_loss(model) / batches
        return (loss, outputs) if return_outputs else loss


parser = argparse.ArgumentParser()
parser.add_argument("--zero", type=int, default=2, choices=[1, 2, 3])
stage = parser.parse_known_args()[0].zero  # the launcher adds options of its own

if "RANK" not in os.environ:  # no launcher: say that this is the only process, else DeepSpeed looks for MPI
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

name = str(encoder_path())  # or "bert-large-cased"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
model = upcycle(model, layers=[3, 5], num_experts=4, num_blocks=8)

texts, labels = labelled_sentences()
rows = Dataset.from_dict({"text": texts[:640], "labels": labels[:640]})
rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns="text")

deepspeed = {
    "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}
options = TrainingArguments(
    "runs/transformers-trainer",
    max_steps=10,
    per_device_train_batch_size=16,
    learning_rate=5e-5,
    deepspeed=deepspeed,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    use_cpu=get_accelerator().device_name() == "cpu",  # without it, several CPU ranks would not find each other
)
trainer = GramTrainer(model, options, train_dataset=rows, processing_class=tokenizer)
loss = trainer.train().training_loss
if trainer.is_world_process_zero():
    print(f"loss {loss:.3f}")
trainer.save_model("runs/transformers-trainer/model")  # unifmoe_dist.enable_from_pretrained() lets it be loaded
leave()  # not through the interpreter's own end, which may abort while gloo's threads run
