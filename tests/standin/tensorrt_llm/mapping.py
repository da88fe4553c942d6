"""Which rank does what."""

from typing import Any


class Mapping:
    """Tensor parallelism only; anything else is refused."""

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        tp_size: int = 1,
        pp_size: int = 1,
    ) -> None:
        if world_size != tp_size or pp_size != 1 or cp_size != 1:
            raise ValueError(f"world_size must equal tp_size, got {world_size} != {tp_size}")
        self.world_size, self.tp_size, self.pp_size, self.cp_size = world_size, tp_size, pp_size, cp_size
        self.gpus_per_node = gpus_per_node
        self.rank = rank

    @classmethod
    def from_dict(cls, mapping: dict[str, Any]) -> "Mapping":
        return cls(**mapping)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @property
    def tp_rank(self) -> int:
        return self.rank

    @property
    def tp_group(self) -> list[int]:
        return list(range(self.tp_size))

    def is_first_pp_rank(self) -> bool:
        return True

    def is_last_pp_rank(self) -> bool:
        return True

    def pp_layers(self, num_layers: int) -> list[int]:
        return list(range(num_layers))
