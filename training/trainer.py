"""One step of training, and one look at how many prompts are answered."""

import torch
from longreach_patches import patch
from torch import nn
from torch.nn import functional as F
from transformers import SmolLM3ForCausalLM

from training.data import Batch
from training.optimizer import MasterMuon

TEXT_WEIGHT = 0.2  # reading text well helps with reading facts; answers matter more
ATTENTIONS = ("longreach", "sdpa", "eager")


class Trainer:
    """The model on its device, in bfloat16 on a GPU, with float32 master weights in its optimizer.

    Args:
        net: the model with fresh float32 weights.
        attention: "longreach" patches the model, so that our kernels run forward and backward; the others are
            transformers' own.
        compiled: whether torch.compile has the layers.
    """

    def __init__(
        self, net: SmolLM3ForCausalLM, device: torch.device, *, attention: str = "longreach", compiled: bool = True
    ) -> None:
        self.net, self.device = net, device
        # The patched layers hold their masks. Given none, transformers looks for packed sequences in the position ids,
        # and waits for the GPU to tell.
        self.masks = dict.fromkeys(net.config.layer_types or ()) if attention == "longreach" else None
        nn.Module.to(net, device)
        self.optimizer = MasterMuon(net, torch.bfloat16 if device.type == "cuda" else torch.float32)
        if attention == "longreach":
            self.backend = patch(net, fuse_norms=not compiled).backend.reason
        else:
            net.set_attn_implementation(attention)
            self.backend = f"transformers, {attention}"
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # a graph for each length
            for layer in net.model.layers:
                nn.Module.compile(layer, dynamic=False)
        net.train()

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Final hidden states (B * L, C) of a batch."""
        hidden = self.net.model(input_ids=batch.ids, attention_mask=self.masks, use_cache=False).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])

    def backward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Loss and gradients of a batch on the device; returns device scalars: the losses, and the shares of questions
        answered exactly and of first answer tokens that are right.
        """
        hidden = self.outputs(batch)
        answers = self.net.lm_head(hidden[batch.at]).float()
        text = self.net.lm_head(hidden[batch.text]).float()
        losses = F.cross_entropy(answers, batch.token, reduction="none")
        answer_loss = (losses * batch.weight).sum() / batch.weight.sum()
        text_loss = F.cross_entropy(text, batch.ids.reshape(-1)[batch.text + 1])
        (answer_loss + TEXT_WEIGHT * text_loss).backward()
        right = answers.argmax(-1) == batch.token
        return {
            "answer": answer_loss.detach(),
            "text": text_loss.detach(),
            "exact": exact(right, batch).mean(),
            "lead": (right & batch.lead).sum() / batch.lead.sum(),  # no indexing by a mask: it would wait for the GPU
        }

    def step(self, batch: Batch, rate: float) -> dict[str, torch.Tensor]:
        """One update; returns what `backward` does, and the norm of the gradient."""
        results = self.backward(batch.to(self.device))
        return {**results, "norm": self.optimizer.step(rate)}

    def answered(self, batch: Batch) -> torch.Tensor:
        """For each question whether greedy decoding gives its answer, (questions,) bool.

        Gradients stay on, so that the compiled layers are used as they are.
        """
        batch = batch.to(self.device)
        logits = self.net.lm_head(self.outputs(batch)[batch.at])
        return exact(logits.argmax(-1) == batch.token, batch) > 0


def exact(right: torch.Tensor, batch: Batch) -> torch.Tensor:
    """For each question 1.0 if every answer token is `right`, that is if greedy decoding gives the answer;
    (questions,).
    """
    wrong = torch.zeros(batch.questions, device=right.device).index_add_(0, batch.question, (~right).float())
    return (wrong == 0).float()
