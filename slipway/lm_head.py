"""What TRL's fused LM head computes on a CPU."""


def score_labelled_tokens_only() -> None:
    """Makes TRL's loss on a CPU score only the tokens that are trained on, as it does on a GPU.

    Elsewhere TRL scores all positions, for accelerators that compile anew for each number of tokens. A CPU does not,
    and the prompts are a third of a demonstration's tokens. The loss is the same.
    """
    from trl.trainer import utils

    on_gpu = utils._use_triton
    utils._use_triton = lambda device: device.type == "cpu" or on_gpu(device)
