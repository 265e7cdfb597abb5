"""Name the types that several fields share."""

from __future__ import annotations

from typing import Annotated, Any

from tr_args.constraints import AtLeast, Between, CommaSeparated, StepsOrRatio, UserPath

Count = Annotated[int, AtLeast(1)]
OptionalCount = Annotated[int | None, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
NonNegative = Annotated[float, AtLeast(0)]
Beta = Annotated[float, Between(0, 1, open_end=True)]
Seed = Annotated[int, Between(0, 2**32 - 1)]
OptionalSeed = Annotated[int | None, Between(0, 2**32 - 1)]
Steps = Annotated[float, StepsOrRatio()]
OptionalSteps = Annotated[float | None, StepsOrRatio()]
Names = Annotated[list[str], CommaSeparated()]
OptionalPath = Annotated[str | None, UserPath()]
Options = dict[str, Any] | None
