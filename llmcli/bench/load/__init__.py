"""Load tests of servers with OpenAI's API: send many parallel requests and measure how long each
one waits.
"""
