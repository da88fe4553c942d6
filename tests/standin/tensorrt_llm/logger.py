"""Says nothing."""


class _Logger:
    def set_level(self, min_severity: str) -> None:
        assert min_severity in ("internal_error", "fatal", "error", "warning", "info", "verbose", "debug", "trace")


logger = _Logger()
