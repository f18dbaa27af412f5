"""Load tests of servers with OpenAI's API: many parallel requests, and how long each of them
waits.
"""
