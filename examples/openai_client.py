"""Talk to a running server with OpenAI's own client, streaming.

    aspire serve smollm2-135m --port 8000
    python examples/openai_client.py "Why is the sky blue?"
"""

import sys

from openai import OpenAI


def main(question: str = "Why is the sky blue?", url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}],
                                            max_tokens=64, temperature=0.7, seed=1, stream=True)
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            print(event.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
