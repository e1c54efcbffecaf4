"""LoRA on the experts of an upcycled decoder, with PEFT. `python examples/peft_lora.py [FOLDER]`

A tiny decoder learns to count: each expert gets a low-rank pair of its own, the routers are trained whole, all else
stays frozen. What was learnt is saved beside the base model, opened again, and merged into it.
"""

import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from unifmoe_dist import diversity_loss, param_groups, upcycle

FOLDER = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
WORDS, STEPS = 32, 80


def numbers(rows):
    return (torch.randint(WORDS, (rows, 1)) + torch.arange(12)) % WORDS


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
dense = LlamaForCausalLM(
    LlamaConfig(**sizes, vocab_size=WORDS, initializer_range=0.2, pad_token_id=0, eos_token_id=None)
)
upcycle(dense, layers=[0, 1], num_experts=4, num_blocks=4).save_pretrained(f"{FOLDER}/base")

base = AutoModelForCausalLM.from_pretrained(f"{FOLDER}/base")
matrices = ["experts.gate_keys", "experts.keys", "experts.values"]  # of each expert its gate, up and down
config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=matrices, modules_to_save=["router"])
model = get_peft_model(base, config)
optimizer = torch.optim.AdamW(param_groups(model, 0.01), lr=0.01)
for step in range(STEPS):
    batch = numbers(16)
    loss = model(input_ids=batch, labels=batch).loss
    (loss + 0.01 * diversity_loss(model)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, STEPS - 1):
        print(f"loss {loss:.2f}")

model.eval().save_pretrained(f"{FOLDER}/adapter")
again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(f"{FOLDER}/base"), f"{FOLDER}/adapter")
merged = again.merge_and_unload()  # an upcycled model like any other
merged.save_pretrained(f"{FOLDER}/merged")
prompt = numbers(1)[:, :4]
for one in (model, merged):
    print("counts", *one.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)[0].tolist())
