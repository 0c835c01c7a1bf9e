"""What tensor parallelism costs: the collectives of a block, as torch's own counter sees them."""
import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from libai_wb.mesh.launch import make_mesh, run_ranks
from libai_wb.mesh.parallelize import parallelize
from libai_wb.mesh.topology import ParallelLayout
from libai_wb.models.registry import model_spec

# blocks, sums of the backward of a block, of the loss
MODELS = {"vit_nano_patch4_8": (4, 2, 2), "mae_vit_nano_patch2_8": (6, 2, 1), "swin_nano_patch2_window2_8": (4, 2, 2),
          "swinv2_nano_window2_8": (4, 3, 2)}  # V2 has one more: its position network is whole on every rank


def counted(run):
    "What `run()` gives, and (all-reduces, other collectives) meanwhile, those that DTensor makes by itself included."
    with CommDebugMode() as seen: found = run()
    sums = sum(n for op, n in seen.get_comm_counts().items() if "reduce_" in str(op) or "all_reduce" in str(op))
    return found, (sums, seen.get_total_counts() - sums)


def blocks_of(model):
    if hasattr(model, "layers"): return [block for stage in model.layers.values() for block in stage.blocks.values()]
    return [*model.blocks.values(), *getattr(model, "decoder_blocks", {}).values()]


def tokens(block):
    side = getattr(block.attn, "resolution", None)
    return torch.randn(2, *((side, side) if side else (5,)), *block.norm1.normalized_shape, requires_grad=True)


def both_ways(run):
    loss, forward = counted(run)
    return forward, counted(loss.backward)[1]


def calls(rank, n, name):
    "(forward, backward) of every block, and of the whole model with its loss."
    target, sizes = model_spec(name)
    with torch.device("meta"): model = target(**sizes)
    model, ids = parallelize(model, make_mesh(ParallelLayout(tp=n)), seed=0).eval(), torch.arange(2)
    def through():
        x = images = torch.randn(2, 1, 8, 8)
        for unit in model.units(): x = unit.call(x, ids, ids)
        return model.loss(x, dict(images=images, labels=ids)).sum()
    return [both_ways(lambda: block(tokens(block)).sum()) for block in blocks_of(model)], both_ways(through)


@pytest.mark.parametrize("name", MODELS)
def test_a_block_costs_two_sums_each_way(name):
    "One behind attention and one behind the MLP, forward and backward; nothing is moved but that, the head and the loss."
    depth, backward, loss = MODELS[name]
    for blocks, whole in run_ranks(calls, 2, name, timeout=100):
        assert blocks == [((2, 0), (backward, 0))] * depth
        assert whole == ((2 * depth + loss, 0), (backward * depth + 1, 0))


def move_needlessly(rank, n):
    "A layer whose weight is gathered: the control."
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = make_mesh(ParallelLayout(tp=n))["tp"]
    w = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
    return counted(lambda: w.full_tensor())[1]


def test_what_a_layout_moves_by_itself_is_counted(): assert run_ranks(move_needlessly, 2, timeout=60) == [(0, 1)] * 2
