"""Diagnostics of a trained top-k MoE layer: the paper's section "Motivation", equations to the letter.

captured = capture(model, {"blocks.3.mlp": layer}, batches, keep_tokens=True)["blocks.3.mlp"]
diagnosis = diagnose(FrozenExperts.of(layer), captured.tokens, expert_scores(captured.routing))
write_diagnosis(diagnosis, folder)
"""
