"""Prompts of several kinds and of any length, put together from texts written for this purpose."""

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]

KINDS = ("english", "chinese", "code", "tools", "ids")
SYSTEM = "You are a careful assistant. Answer in the language of the user."

ENGLISH = """\
The ferry to the outer islands leaves at a quarter past six, unless the fog is thicker than the captain likes.
Please summarise the following minutes in three bullet points and name the person who is responsible for each.
My grandmother kept her recipes in a tin box; half of them were written on the backs of old bus tickets.
We measured a median latency of 41.7 ms before the change and 38.2 ms after it, over 12,000 requests on 2 March 2024.
Is it true that octopuses can taste with their arms, and if so, how did anybody find that out?
The committee regrets that it cannot reimburse travel expenses submitted after the thirtieth day.
"You said Tuesday," Marta whispered, "and it's Thursday already, so where have you been sleeping?"
Photosynthesis turns carbon dioxide and water into sugar, and releases oxygen as what is, to the plant, mere waste.
A lease that doesn't state who repairs the boiler will, sooner or later, be read aloud in front of a judge.
Rewrite the paragraph below for a reader of ten years. Don't use words longer than three syllables!
Although the bridge had been closed since 1987, cyclists went on using it, lifting their bikes over the barrier.
The patient reports intermittent dizziness, mild hypertension (148/92 mmHg) and no previous cardiovascular disease.
Our quarterly revenue rose by 6.3% to $18.4 million, chiefly thanks to subscriptions in Norway, Chile and Japan.
hey, quick one: does the blue jacket come in XL?? also can u ship to a PO box thx
Between the two theorems lies a gap that the author fills with the phrase "it is easy to see", which it is not.
Turn left after the bakery, go past a yellow gate, and you'll hear the dog before you see the house.
Compare the arguments of both sides without taking one, and finish with a question that neither of them answered.
The violin was neither old nor valuable, yet nobody in the quartet would let the insurers call it replaceable.
Server rack 14B draws 3.6 kW at idle; with all sixteen accelerators busy, the breaker trips within forty seconds.
Write a friendly e-mail to a customer whose parcel was lost twice; offer a refund, a voucher, or a third attempt.
Snow fell on the orchard all night, so that by morning the ladders looked like the ribs of some patient animal.
Under section 4(b), either party may terminate this agreement upon ninety days' written notice to the other.
He counted the stairs, as always: thirty-one up, thirty-one down, and never once the same as the night before.
What would a medieval cartographer have thought of a satellite photograph of his own village?
Subject: Re: Re: Fwd: invoice #20931, still unpaid! Dear Sir or Madam, I refer to my letters of 4 and 19 May.
Mix 250 g of flour with a pinch of salt, rub in 125 g of cold butter, and add just enough water to bind it.
In the end the expedition was saved by a cook, two tins of paraffin and an argument about the meaning of north.
The translation is accurate but lifeless; read it aloud and you will notice that no sentence wants to be heard.
Explain why the sky is blue, then explain why most explanations of why the sky is blue are incomplete.
Ticket sales close at noon. Doors open at 7:30 p.m., and latecomers will be seated at the interval only.
""".splitlines()

CHINESE = """\
早上六点的渡轮如果遇到大雾就会晚开,船长从来不愿意冒险。
请把下面的会议记录总结成三条要点,并写明每一项由谁负责。
祖母把菜谱放在一个铁盒里,其中一半写在旧车票的背面。
修改之前的延迟中位数是41.7毫秒,修改之后是38.2毫秒,共测量了一万两千次请求。
章鱼真的能用腕足尝出味道吗?科学家是怎么发现这一点的?
逾期三十天以上提交的差旅费,委员会一律不予报销,敬请谅解。
“你说的是星期二,”她小声说,“今天已经星期四了,你这几天住在哪里?”
光合作用把二氧化碳和水变成糖,同时放出氧气,对植物来说氧气只是废物。
租约里没有写明由谁修理锅炉,迟早会闹到法庭上去。
请用十岁孩子能看懂的话改写下面这段文字,不要使用成语。
那座桥自从一九八七年封闭以后,骑车的人仍旧把车扛过栏杆。
患者自述间歇性头晕,血压轻度升高,既往没有心血管疾病。
本季度营业收入增长百分之六点三,主要来自挪威、智利和日本的订阅用户。
你好,请问这件蓝色外套有加大码吗?能不能寄到学校的收发室?
两条定理之间有一处空白,作者只用一句“显然”带过,其实一点也不显然。
过了面包店往左拐,经过一扇黄色的大门,你会先听见狗叫,再看见房子。
比较双方的论点,不要偏袒任何一方,最后提出一个谁都没有回答的问题。
这把小提琴既不古老也不值钱,但四重奏里没有人愿意换掉它。
十四号机柜空闲时耗电三点六千瓦,满载四十秒之内就会跳闸。
给包裹丢了两次的顾客写一封友好的邮件,可以退款、送代金券或者重新发货。
雪下了一整夜,到了早晨,果园里的梯子像某种温顺动物的肋骨。
根据第四条第二款,任何一方提前九十天书面通知对方即可终止本协议。
他像往常一样数着台阶,上去三十一级,下来三十一级,每晚却都不一样。
一位中世纪的制图师看到自己村庄的卫星照片,会有什么感想?
面粉二百五十克,加一小撮盐,揉进一百二十五克冷黄油,再加少许水和成团。
探险队最后得救,靠的是一个厨师、两罐煤油和一场关于北方在哪里的争论。
译文准确却没有生气,念出声来就会发现没有一句话想被人听见。
先解释天空为什么是蓝色的,再解释为什么大多数解释都不完整。
中午停止售票,晚上七点半开门,迟到的观众要等到中场休息才能入座。
服务器重启之后,请检查日志里有没有超时的记录,并把结果发到群里。
""".splitlines()

CODE = [
    '''\
def moving_average(values: list[float], width: int) -> list[float]:
    """Mean of each window of `width` neighbours."""
    if width < 1:
        raise ValueError(f"width must be positive, not {width}")
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        if index >= width - 1:
            means.append(total / width)
    return means
''',
    """\
export async function loadOrders(customerId, { signal, pageSize = 50 } = {}) {
  const orders = [];
  let cursor = null;
  do {
    const query = new URLSearchParams({ customerId, limit: String(pageSize), ...(cursor && { cursor }) });
    const response = await fetch(`/api/orders?${query}`, { signal, headers: { accept: 'application/json' } });
    if (!response.ok) throw new Error(`orders: HTTP ${response.status}`);
    const page = await response.json();
    orders.push(...page.items);
    cursor = page.nextCursor ?? null;
  } while (cursor);
  return orders;
}
""",
    """\
SELECT c.region, date_trunc('month', o.placed_at) AS month, count(*) AS orders, sum(o.total_cents) / 100.0 AS revenue
FROM orders o JOIN customers c ON c.id = o.customer_id
WHERE o.state NOT IN ('cancelled', 'refunded') AND o.placed_at >= now() - interval '13 months'
GROUP BY 1, 2 HAVING count(*) > 10 ORDER BY month DESC, revenue DESC LIMIT 200;
""",
    """\
static int ring_push(struct ring *r, const uint8_t *src, size_t len)
{
\tsize_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
\tsize_t tail = atomic_load_explicit(&r->tail, memory_order_acquire);

\tif (len > r->size - (head - tail))
\t\treturn -ENOSPC;
\tfor (size_t i = 0; i < len; i++)
\t\tr->buf[(head + i) & (r->size - 1)] = src[i];
\tatomic_store_explicit(&r->head, head + len, memory_order_release);
\treturn 0;
}
""",
    """\
impl<T: Ord + Copy> Heap<T> {
    pub fn pop(&mut self) -> Option<T> {
        let last = self.items.pop()?;
        if self.items.is_empty() {
            return Some(last);
        }
        let top = std::mem::replace(&mut self.items[0], last);
        self.sift_down(0);
        Some(top)
    }
}
""",
    """\
services:
  gateway:
    image: registry.example.org/edge/gateway:2.14.0
    ports: ["8080:8080", "9090:9090"]
    environment:
      LOG_LEVEL: warn
      UPSTREAM_URL: http://engine:8001
    healthcheck:
      test: ["CMD", "wget", "-qO-", "http://127.0.0.1:8080/healthz"]
      interval: 5s
      retries: 12
""",
    """\
Traceback (most recent call last):
  File "/srv/jobs/nightly/export.py", line 218, in <module>
    main(sys.argv[1:])
  File "/srv/jobs/nightly/export.py", line 197, in main
    rows = fetch(connection, since=args.since, batch=args.batch)
  File "/srv/jobs/nightly/fetch.py", line 64, in fetch
    cursor.execute(QUERY, {"since": since, "limit": batch})
OperationalError: server closed the connection unexpectedly (0x0000274D/10061)
""",
    """\
<form class="search" method="get" action="/catalogue" data-controller="typeahead">
  <label for="q">Search 4,200 titles</label>
  <input id="q" name="q" type="search" autocomplete="off" minlength="2" placeholder="Author, title or ISBN">
  <ul class="hits" role="listbox" aria-live="polite" hidden></ul>
</form>
""",
    """\
func (s *Store) Renew(ctx context.Context, key string, ttl time.Duration) error {
\ts.mu.Lock()
\tdefer s.mu.Unlock()
\tlease, ok := s.leases[key]
\tif !ok || lease.expires.Before(s.now()) {
\t\treturn fmt.Errorf("renew %q: %w", key, ErrExpired)
\t}
\tlease.expires = s.now().Add(ttl)
\treturn s.log.Append(ctx, record{Op: opRenew, Key: key, At: lease.expires})
}
""",
    """\
#!/usr/bin/env bash
set -euo pipefail
for archive in "$BACKUP_DIR"/*.tar.zst; do
  name=$(basename "$archive" .tar.zst)
  if ! zstd -t "$archive" 2>/dev/null; then
    echo "broken: $name" >&2; failed+=("$name"); continue
  fi
  printf '%-40s %8s\\n' "$name" "$(du -h "$archive" | cut -f1)"
done
[[ ${#failed[@]} -eq 0 ]] || exit 1
""",
]


def _tool(name: str, description: str, required: Sequence[str], **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


TOOLS = [
    _tool(
        "get_weather",
        "Current weather at a place, or the forecast for one of the next ten days.",
        ["location"],
        location=_text("City and country, such as 'Bergen, Norway'."),
        day={"type": "integer", "minimum": 0, "maximum": 10, "default": 0},
        unit=_text("Unit of temperatures.", enum=["celsius", "fahrenheit"]),
    ),
    _tool(
        "search_tickets",
        "Find support tickets. Returns at most fifty, the newest first.",
        [],
        query=_text("Words that must occur in the title or in a message."),
        status={"type": "array", "items": {"type": "string", "enum": ["open", "waiting", "solved", "closed"]}},
        assignee_id=_text("User id of the agent, or 'nobody'."),
        created_after=_text("ISO 8601 date.", format="date"),
    ),
    _tool(
        "create_invoice",
        "Write an invoice for a customer; it is a draft until it is sent.",
        ["customer_id", "lines"],
        customer_id=_text("Id of the customer.", pattern="^cus_[a-z0-9]{12}$"),
        lines={
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string"},
                    "quantity": {"type": "integer", "minimum": 1},
                    "unit_price_cents": {"type": "integer"},
                    "tax_rate": {"type": "number", "enum": [0, 0.07, 0.19]},
                },
                "required": ["sku", "quantity"],
                "additionalProperties": False,
            },
        },
        due_in_days={"type": ["integer", "null"], "description": "Days until payment is due; null means at once."},
    ),
    _tool(
        "run_sql",
        "Run one read-only statement against the reporting database and return its rows as JSON.",
        ["statement"],
        statement=_text("A single SELECT; anything else is refused."),
        timeout_ms={"type": "integer", "default": 5000},
    ),
    _tool("read_file", "Contents of a text file in the workspace.", ["path"], path=_text("Path below the root.")),
    _tool(
        "book_room",
        "Reserve a meeting room.",
        ["room", "from", "until"],
        room=_text("Name of the room."),
        attendees={"type": "array", "items": {"type": "string", "format": "email"}},
        **{"from": _text("Start, local time."), "until": _text("End, local time.")},
    ),
]
TOOL_ANSWERS = [
    {
        "temperature": 4.5,
        "unit": "celsius",
        "wind": {"speed": 11, "from": "NW"},
        "summary": "light rain, clearing later",
    },
    {
        "rows": [
            {"region": "north", "orders": 1283, "revenue": 90412.55},
            {"region": "west", "orders": 77, "revenue": None},
        ]
    },
    {
        "tickets": [{"id": 88123, "title": "Login loop after update", "status": "open", "assignee_id": "u_17"}],
        "more": True,
    },
    {"error": "no such room", "known": ["Elbe", "Moldau", "Themse"], "retry": False},
]
TOOL_CALLS = [
    ("get_weather", {"location": "Bergen, Norway", "unit": "celsius"}),
    ("run_sql", {"statement": "SELECT region, count(*) FROM orders GROUP BY region", "timeout_ms": 2000}),
    ("search_tickets", {"query": "login loop", "status": ["open", "waiting"]}),
    ("book_room", {"room": "Spree", "from": "2025-03-04T09:00", "until": "2025-03-04T10:30"}),
]


@dataclass(frozen=True)
class Case:
    """One request, and what its prompt is for the model: a text, or token ids."""

    kind: str
    path: str
    body: dict[str, Any]
    prompt: str | list[int]


class Sample:
    """Makes requests whose costs are spread evenly between two bounds; answers are up to half of the cost.

    `size` counts the tokens of a text, `render` is the model's chat template.
    """

    def __init__(self, seed: int, size: Callable[[str], int], render: Render, costs: tuple[int, int]) -> None:
        self._rng = random.Random(seed)
        self._size = functools.cache(size)
        self._render = render
        self._costs = costs
        self._makers: dict[str, Callable[[int, int], Case]] = {
            "english": functools.partial(self._plain, "english", ENGLISH, " "),
            "chinese": functools.partial(self._plain, "chinese", CHINESE, ""),
            "code": functools.partial(self._plain, "code", CODE, "\n"),
            "tools": self._with_tools,
            "ids": self._ids,
        }

    def take(self, kind: str, number: int) -> list[Case]:
        """So many requests of one of the `KINDS`."""
        cases = []
        for _ in range(number):
            cost = self._rng.randint(*self._costs)
            output = self._rng.randint(1, cost // 2)
            cases.append(self._makers[kind](cost - output, output))
        return cases

    def _plain(self, kind: str, pieces: Sequence[str], glue: str, tokens: int, output: int) -> Case:
        text = self._text(pieces, glue, tokens)
        if self._rng.random() < 0.5:
            return Case(kind, "/v1/completions", {"prompt": text, "max_tokens": output}, text)
        messages: Messages = [{"role": "user", "content": text}]
        if self._rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        return _chat(kind, output, messages, self._render(messages))

    def _text(self, pieces: Sequence[str], glue: str, tokens: int) -> str:
        """About so many tokens of pieces in a random order, the last one cut."""
        chosen: list[str] = []
        while tokens > 0:
            piece = self._rng.choice(pieces)
            size = self._size(piece)
            chosen.append(piece if size <= tokens else piece[: max(1, len(piece) * tokens // size)])
            tokens -= size
        return glue.join(chosen)

    def _with_tools(self, tokens: int, output: int) -> Case:
        rng = self._rng
        tools = rng.sample(TOOLS, rng.randint(1, len(TOOLS)))
        messages: Messages = [{"role": "user", "content": rng.choice(ENGLISH)}]
        tokens -= self._size(self._render(_shown(messages, tools)))
        while tokens > 0:
            turn = self._turn()
            messages += turn
            tokens -= self._size(self._render(_shown(turn, ()))) - self._size(self._render(_shown((), ())))
        return _chat("tools", output, messages, self._render(_shown(messages, tools)), tools=tools)

    def _turn(self) -> Messages:
        rng = self._rng
        call_id = f"call_{rng.getrandbits(48):012x}"
        name, arguments = rng.choice(TOOL_CALLS)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": json.dumps(rng.choice(TOOL_ANSWERS))},
            {"role": "assistant", "content": " ".join(rng.sample(ENGLISH, rng.randint(1, 3)))},
            {"role": "user", "content": rng.choice(ENGLISH)},
        ]

    def _ids(self, tokens: int, output: int) -> Case:
        ids = [self._rng.randrange(49_000) for _ in range(tokens)]
        prompt = self._rng.choice([ids, [ids]])
        return Case("ids", "/v1/completions", {"prompt": prompt, "max_tokens": output}, ids)


def _chat(kind: str, output: int, messages: Messages, prompt: str, **more: Any) -> Case:
    return Case(kind, "/v1/chat/completions", {"messages": messages, "max_tokens": output, **more}, prompt)


def _shown(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Messages:
    """Tools and their calls as text, in the way of the templates of models that know tools."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    system = (
        "# Tools\n\nYou may call functions to help with the user's request. Their signatures:\n"
        f"<tools>\n{listed}\n</tools>\n\nAnswer with one JSON object inside <tool_call></tool_call> for each call."
    )
    shown: Messages = [{"role": "system", "content": system}]
    for message in messages:
        content = message["content"] or ""
        for call in message.get("tool_calls", []):
            content += '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'.format_map(
                call["function"]
            )
        shown.append({"role": message["role"], "content": content})
    return shown
