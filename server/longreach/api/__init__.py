"""The OpenAI API over one engine; `server` is the process around it, and `app` the application.

- `endpoints` read a request and have it answered; `schema` says what requests and answers may hold;
- `generation` turns checked requests into answers, `service` is what all requests share;
- `http` is the protocol below them, and `documentation` the OpenAPI document.
"""
