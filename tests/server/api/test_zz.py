import json
from tests.server.api.conftest import MODEL
from tests.server.api.test_chat import TEMPLATE, says, prompt_of
def test_x(make_server, tokenizer):
    with make_server(template=TEMPLATE) as s:
        W={"type":"function","name":"weather","description":"d","parameters":{"type":"object","properties":{"city":{"type":"string"}}},"strict":False}
        says(s, tokenizer, '<think>hm</think>I look.\n<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>\n<tool_call>{"name":"patch","arguments":{"input":"*** A\\n\\u00e9"}}</tool_call>')
        tools=[W,{"type":"custom","name":"patch","format":{"type":"grammar","syntax":"lark","definition":"start: /x/"}},{"type":"namespace","name":"mcp.x","description":"","tools":[dict(W,name="w2")]},{"type":"web_search"}]
        r=s.http.post("/v1/responses",json={"model":MODEL,"input":"Hi","tools":tools,"stream":True})
        print(r.headers, r.text)
        r=s.openai.responses.create(model=MODEL,input="Hi",tools=tools)
        print(r.output)
        says(s, tokenizer, 'Done')
        calls=[i for i in r.output if i.type in("function_call","custom_tool_call")]
        outs=[{"type":c.type+"_output","call_id":c.call_id,"output":"7"} for c in calls]
        r2=s.openai.responses.create(model=MODEL,input=[{"role":"user","content":"Hi"},*r.output,*outs],tools=tools)
        print(prompt_of(s,tokenizer))
        r3=s.openai.responses.create(model=MODEL,input=outs,tools=tools,previous_response_id=r.id)
        p3=prompt_of(s,tokenizer)
        r4=s.openai.responses.create(model=MODEL,input=[{"role":"user","content":"Hi"},*[{"type":"item_reference","id":i.id} for i in r.output],*outs],tools=tools)
        assert prompt_of(s,tokenizer)==p3
        print(s.openai.responses.input_items.list(r3.id), s.openai.responses.retrieve(r3.id).output_text)
        print(s.openai.responses.input_tokens.count(model=MODEL,input="Hi",tools=tools))
        b=s.openai.responses.create(model=MODEL,input="Hi",background=True)
        print(b.status)
        import time; time.sleep(.2); print(s.openai.responses.retrieve(b.id).status)
        st=s.openai.responses.create(model=MODEL,input="Hi",background=True,stream=True)
        ev=list(st); print([e.type for e in ev]); rid=ev[0].response.id
        print([e.sequence_number for e in s.openai.responses.retrieve(rid,stream=True,starting_after=3)])
        s.engine.hold_decode_after=1
        b=s.openai.responses.create(model=MODEL,input="Hi",background=True)
        time.sleep(.1); print(s.openai.responses.retrieve(b.id).status); print(s.openai.responses.cancel(b.id).status, s.openai.responses.retrieve(b.id).status)
        s.openai.responses.delete(b.id)
        print(s.http.get(f"/v1/responses/{b.id}").text)
        assert 0
