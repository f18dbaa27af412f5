"""The clients that `run.py` checks, and the servers that `tool_servers.py` checks: the script of
each client, and the packages that they need.
"""

from dataclasses import dataclass

# Packages of each virtual environment. Clients whose dependencies contradict each other have
# environments of their own.
ENVIRONMENTS = {
    "python": (
        "anthropic==2.12.0",
        "langchain-openai==1.7.3",
        "llm==0.36",
        "ollama==0.6.3",
        "openai==3.54.0",
    ),
    "agno": ("agno==3.1.10", "anthropic==2.14.0", "ollama==0.6.3", "openai==3.57.0"),
    "dspy": ("dspy==3.4.1", "numpy==2.4.6"),
    "haystack": ("haystack-ai==3.4.1",),
    "instructor": ("instructor==1.17.0",),
    "litellm": ("litellm==1.110.2",),
    "llama-index": (
        "anthropic==0.125.0",
        "llama-index-core==0.14.25",
        "llama-index-embeddings-openai-like==0.4.0",
        "llama-index-llms-anthropic==0.12.3",
        "llama-index-llms-ollama==0.11.0",
        "llama-index-llms-openai-like==0.8.1",
    ),
    "openai-agents": ("openai-agents==0.24.0",),
    "pydantic-ai": ("pydantic-ai-slim[anthropic,openai]==2.68.0",),
    "smolagents": ("smolagents[litellm,openai]==1.26.0",),
    "strands": ("strands-agents[anthropic,litellm,ollama,openai]==1.62.0",),
}
# node, because the newest versions need at least node 22
NPM_PACKAGES = (
    "@ai-sdk/anthropic@4.0.105",
    "@ai-sdk/groq@4.0.84",
    "@ai-sdk/mistral@4.0.87",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@anthropic-ai/sdk@1.14.0",
    "ai@7.0.173",
    "ai-sdk-ollama@4.3.0",
    "node@22.23.3",
    "ollama@0.6.4",
    "openai@7.57.0",
    "zod@4.6.7",
)
# servers of tools, which `tool_servers.py` calls
TOOL_SERVERS = ("mcp-server-fetch==2026.10.24", "mcp-server-time==2026.10.19")
NPM_TOOL_SERVERS = (
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
)
NPM = "npm"  # the environment of the clients in JavaScript


@dataclass(frozen=True, slots=True)
class Client:
    """A client. `script`: the file with its calls. `environment`: a key of ENVIRONMENTS, or NPM."""

    name: str
    script: str
    environment: str


CLIENTS = (
    Client("openai-python", "with_openai.py", "python"),
    Client("llm", "with_llm.py", "python"),
    Client("langchain-openai", "with_langchain.py", "python"),
    Client("anthropic", "with_anthropic.py", "python"),
    Client("ollama", "with_ollama.py", "python"),
    Client("smolagents", "with_smolagents.py", "smolagents"),
    Client("instructor", "with_instructor.py", "instructor"),
    Client("pydantic-ai", "with_pydantic_ai.py", "pydantic-ai"),
    Client("litellm", "with_litellm.py", "litellm"),
    Client("llama-index", "with_llama_index.py", "llama-index"),
    Client("openai-agents", "with_openai_agents.py", "openai-agents"),
    Client("dspy", "with_dspy.py", "dspy"),
    Client("strands-agents", "with_strands.py", "strands"),
    Client("agno", "with_agno.py", "agno"),
    Client("haystack-ai", "with_haystack.py", "haystack"),
    Client("npm:openai", "with_openai.mjs", NPM),
    Client("npm:ai", "with_ai.mjs", NPM),
    Client("npm:ollama", "with_ollama.mjs", NPM),
    Client("npm:@anthropic-ai/sdk", "with_anthropic.mjs", NPM),
)
