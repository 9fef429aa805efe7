"""Files behind URLs come from public addresses only, whatever a name, a redirect or a server does."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import httpx
import pytest

from swift.data.downloads import MAX_REDIRECTS, download, is_public
from swift.data.records import RowError

PUBLIC = "93.184.215.14"
HOSTS = {
    "images.example": [PUBLIC],
    "six.example": ["2606:2800:21f:cb07:6820:80da:af6b:8b2c"],
    "inner.example": ["127.0.0.1"],
    "both.example": [PUBLIC, "10.0.0.1"],
    "metadata.example": ["169.254.169.254"],
}


class Answers(BaseHTTPRequestHandler):
    """Paths are what the server does; it notes the `Host` of each request."""

    protocol_version = "HTTP/1.1"
    hosts: ClassVar = []

    def do_GET(self):
        self.hosts.append(self.headers["Host"])
        name, _, value = self.path.lstrip("/").partition("/")
        getattr(self, name)(value)

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def body(self, size):
        self.answer(200, bytes(int(size)))

    def status(self, code):
        self.answer(int(code))

    def to(self, url):
        self.answer(302, Location=url)

    def loop(self, number):
        self.answer(302, Location=f"/loop/{int(number) + 1}")

    def hops(self, number):
        self.answer(302, Location=f"/hops/{int(number) - 1}" if int(number) > 1 else "/body/5")

    def endless(self, _):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.drip(bytes(1 << 16), 0)

    def slow_body(self, _):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.drip(b"x", 0.05)

    def slow_header(self, _):
        self.drip(b"H", 0.05)

    def silent(self, _):
        time.sleep(3)

    def garbage(self, _):
        self.wfile.write(b"\0\1\2\r\n\r\n")
        self.close_connection = True

    def drip(self, data, pause_s):
        end = time.monotonic() + 10
        self.close_connection = True
        try:
            while time.monotonic() < end:
                self.wfile.write(data)
                time.sleep(pause_s)
        except OSError:  # the client has gone, as it should
            return

    def log_message(self, *args):
        """Quiet."""


class Rerouted(httpx.AsyncBaseTransport):
    """What is sent to a public address arrives at the local server; `asked` are the URLs."""

    def __init__(self, port):
        self.port, self.asked, self.extensions = port, [], []
        self.inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request):
        self.asked.append(str(request.url))
        self.extensions.append(request.extensions.get("sni_hostname"))
        request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=self.port)
        return await self.inner.handle_async_request(request)

    async def aclose(self):
        await self.inner.aclose()


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def web(server):
    return Web(Rerouted(server.server_port))


class Web:
    """`get` downloads from the local server under the names of `HOSTS`; `resolved` are those that were looked up."""

    def __init__(self, transport):
        self.transport, self.resolved = transport, []

    async def resolve(self, host, port):
        self.resolved.append((host, port))
        return HOSTS.get(host, [host])

    def get(self, url, max_bytes=1000, limit_s=5.0):
        return download(url, max_bytes, limit_s=limit_s, resolve=self.resolve, transport=self.transport)

    def refusal(self, *args, **settings):
        with pytest.raises(RowError) as caught:
            self.get(*args, **settings)
        return str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0",
     "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1",
     "2002:7f00:1::", "2002:a00:1::", "2001:0:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1::1", "2001:db8::1", "100::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(address):
    assert is_public(address)


def test_a_file_is_downloaded_from_the_address_that_was_checked(web):
    Answers.hosts.clear()
    assert web.get("http://images.example/body/1000") == bytes(1000)
    assert web.resolved == [("images.example", 80)]
    assert web.transport.asked == [f"http://{PUBLIC}/body/1000"]
    assert Answers.hosts == ["images.example"]


def test_tls_asks_for_the_certificate_of_the_name(web):
    web.get("https://images.example:8443/body/5")
    assert web.resolved == [("images.example", 8443)]
    assert web.transport.asked == [f"https://{PUBLIC}:8443/body/5"]
    assert web.transport.extensions == ["images.example"]


def test_an_address_of_version_6(web):
    web.get("http://six.example/body/5")
    assert web.transport.asked == [f"http://[{HOSTS['six.example'][0]}]/body/5"]


@pytest.mark.parametrize("host", ["inner.example", "both.example", "metadata.example", "127.0.0.1", "[::1]"])
def test_nothing_is_sent_to_other_addresses(host, web):
    line = web.refusal(f"http://{host}/body/5")
    assert line.endswith("which is not public; store the file beside the dataset")
    assert web.transport.asked == []


@pytest.mark.parametrize("host", ["localhost", "2130706433", "0x7f.1", "127.1", "[::ffff:127.0.0.1]"])
def test_the_system_s_own_resolver_is_not_deceived_by_spellings(host):
    with pytest.raises(RowError, match=r"is not public|cannot be downloaded"):
        download(f"http://{host}:9/", 1000)


def test_a_name_that_changes_its_address_after_the_check_gains_nothing(web):
    answers = [[PUBLIC], ["127.0.0.1"]]

    async def resolve(host, port):
        return answers.pop(0)

    download("http://rebinding.example/body/5", 1000, resolve=resolve, transport=web.transport)
    assert web.transport.asked == [f"http://{PUBLIC}/body/5"] and len(answers) == 1


@pytest.mark.parametrize(
    ("target", "expected"),
    [("http://inner.example/body/5", "inner.example has the address 127.0.0.1, which is not public"),
     ("http://169.254.169.254/latest", "169.254.169.254 has the address 169.254.169.254, which is not public"),
     ("//[::1]/", "::1 has the address ::1, which is not public"),
     ("file:///etc/passwd", "leads to file://; only http and https are read"),
     ("ftp://images.example/", "leads to ftp://images.example; only http and https are read"),
     ("http://me:secret@images.example/", "a URL with a user name or password is not read")],
)  # fmt: skip
def test_redirects_are_checked_like_the_first_url(target, expected, web):
    assert expected in web.refusal(f"http://images.example/to/{target}")
    assert len(web.transport.asked) == 1


def test_a_few_redirects_are_followed(web):
    assert web.get(f"http://images.example/hops/{MAX_REDIRECTS}") == bytes(5)
    assert web.get("http://images.example/to/http://six.example/body/7") == bytes(7)
    assert web.refusal(f"http://images.example/hops/{MAX_REDIRECTS + 1}") == "more than 5 redirects; give the final URL"
    assert web.refusal("http://images.example/loop/0") == "more than 5 redirects; give the final URL"


def test_the_size_is_limited_while_it_arrives(web):
    assert web.refusal("http://images.example/body/1001") == "over 1000 bytes; make it smaller"
    assert web.refusal("http://images.example/endless/", max_bytes=10**6) == "over 1000000 bytes; make it smaller"


@pytest.mark.parametrize("path", ["slow_body", "slow_header", "silent"])
def test_the_time_is_limited_as_a_whole(path, web):
    start = time.monotonic()
    line = web.refusal(f"http://images.example/{path}/", limit_s=0.5)
    assert line == "not downloaded within 0.5 s; store the file beside the dataset"
    assert time.monotonic() - start < 2.5


@pytest.mark.parametrize("code", [204, 304, 401, 404, 500])
def test_only_a_good_answer_counts(code, web):
    assert web.refusal(f"http://images.example/status/{code}") == f"the server answers {code}; correct the URL"


@pytest.mark.parametrize("url", ["http://", "http://[", "http://a b/", "http://host:99999999/", "http://x\0y/"])
def test_broken_urls_are_refused(url, web):
    assert ";" in web.refusal(url)
    assert web.transport.asked == []


def test_a_server_that_breaks_off_or_speaks_otherwise(web):
    assert web.refusal("http://images.example/garbage/").startswith("cannot be downloaded (")


def test_a_host_that_is_not_known():
    async def resolve(host, port):
        raise OSError(-2, "Name or service not known")

    with pytest.raises(RowError, match=r"cannot be downloaded \(.*Name or service not known\); store the file beside"):
        download("http://nowhere.example/", 1000, resolve=resolve)


def test_proxies_of_the_environment_are_not_used(web, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert web.get("http://images.example/body/5") == bytes(5)
