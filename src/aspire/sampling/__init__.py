"""What changes logits before the sampler, the same for draft and target: penalties, biases, bans, grammar masks."""
