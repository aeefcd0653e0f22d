"""The OpenAI API over one engine: what a request may say (`schema`), how it is read (`body`), run (`generation`),
answered (`completions`, `stream`), refused (`errors`) and recorded (`record`); `server` is the process around it."""
