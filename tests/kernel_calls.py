"""What an op's kernels are called with."""


def record_kernel_calls(monkeypatch, op, name="cpu"):
    """The list that each call of a backend's forward adds its arguments to: inputs, and `keep`."""
    calls, backend = [], op.backends[name]

    def forward(inputs, *keep):
        calls.append((*inputs, *keep))
        return backend.forward(inputs, *keep)

    monkeypatch.setitem(op.backends, name, backend._replace(forward=forward))
    return calls
