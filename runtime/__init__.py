"""Running a pair. Floors from the top: openai and triton_backend, serving, llm, loading, drafting, engine, parallel,
runners, sampling and text.
"""
