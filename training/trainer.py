"""One step of training, and one look at how many prompts are answered."""

import torch
from longreach_patches import patch
from torch import nn
from torch.nn import functional as F
from transformers import SmolLM3ForCausalLM

from training.data import Batch
from training.graphs import GraphedSteps, Results
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
        graphed: whether steps are replayed as CUDA graphs; all work of the process then goes to a stream of its own.
    """

    def __init__(
        self,
        net: SmolLM3ForCausalLM,
        device: torch.device,
        *,
        attention: str = "longreach",
        compiled: bool = True,
        graphed: bool = False,
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
        self.graphs = GraphedSteps(self.update, device) if graphed else None

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Final hidden states (B * L, C) of a batch."""
        hidden = self.net.model(input_ids=batch.ids, attention_mask=self.masks, use_cache=False).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])

    def backward(self, batch: Batch) -> Results:
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
            "exact": 1 - failed(right, batch).sum() / (batch.question.max() + 1),
            "lead": (right & batch.lead).sum() / batch.lead.sum(),  # no indexing by a mask: it would wait for the GPU
        }

    def update(self, batch: Batch) -> Results:
        """One update, at the optimizer's rate, by a batch on the device; returns what `backward` does, and the norm of
        the gradient.
        """
        results = self.backward(batch)
        return {**results, "norm": self.optimizer.update()}

    def step(self, batch: Batch, rate: float) -> Results:
        """One update at learning rate `rate`; returns what `update` does, which holds until the next one."""
        self.optimizer.rate.fill_(rate)
        return self.graphs.step(batch) if self.graphs else self.update(batch.to(self.device))

    def answered(self, batch: Batch) -> torch.Tensor:
        """For each question whether greedy decoding gives its answer, (questions,) bool.

        Gradients stay on, so that the compiled layers are used as they are.
        """
        batch = batch.to(self.device)
        logits = self.net.lm_head(self.outputs(batch)[batch.at])
        return ~failed(logits.argmax(-1) == batch.token, batch)


def failed(right: torch.Tensor, batch: Batch) -> torch.Tensor:
    """For each question whether an answer token is not `right`, so that greedy decoding does not give the answer;
    (questions,) bool.
    """
    wrong = ~right & (batch.weight > 0)
    return torch.zeros(batch.questions, device=right.device).index_add_(0, batch.question, wrong.float()) > 0
