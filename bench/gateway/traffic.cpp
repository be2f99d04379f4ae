// Traffic for measuring gateways: a fast upstream and a load generator in one program, one thread, epoll.
//
//   traffic upstream --port 9100 --interval-us 20000
//       An OpenAI-compatible server that computes nothing. A request whose body asks for a stream gets
//       max_tokens chunks, one each interval; every chunk carries the time at which it was sent.
//   traffic load --port 8000 --connections 64 --seconds 10 --body FILE [--path P] [--header 'Name: value']
//       Keeps every connection busy: sends the body, reads the answer, sends again. Prints one line of JSON:
//       answers, errors, and quantiles of the latency, or with --stream of the chunks' delay.
//       With --rate R it sends R requests a second instead, on whatever connection is free (an open loop); where none
//       is free the request is missed, which is counted. Answers of 429 and 503 are refusals, with quantiles of their
//       own. Eight '@' in the body become the request's number.
//
// Delays compare CLOCK_MONOTONIC of two processes on one machine. Quantiles are exact: all samples are kept.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <string_view>
#include <vector>

namespace {

using std::string;
using std::string_view;

int64_t now_ns() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

[[noreturn]] void fail(const char* what) {
    perror(what);
    exit(1);
}

struct Options {
    std::map<string, string> values;
    std::vector<string> headers;

    Options(int count, char** words) {
        for (int i = 2; i < count; ++i) {
            string name = words[i];
            if (name == "--stream") {
                values["stream"] = "1";
            } else if (i + 1 < count && name == "--header") {
                headers.emplace_back(words[++i]);
            } else if (i + 1 < count && name.rfind("--", 0) == 0) {
                values[name.substr(2)] = words[++i];
            } else {
                fprintf(stderr, "unknown option %s\n", words[i]);
                exit(2);
            }
        }
    }
    int64_t number(const string& name, int64_t otherwise) const {
        auto found = values.find(name);
        return found == values.end() ? otherwise : atoll(found->second.c_str());
    }
    string text(const string& name, const string& otherwise) const {
        auto found = values.find(name);
        return found == values.end() ? otherwise : found->second;
    }
};

struct Connection {
    int fd = -1;
    string in;
    string out;
    size_t sent = 0;
    bool wants_write = false;
    // upstream: a stream under way
    int left = 0;
    int64_t due = 0;
    uint64_t life = 0;  // tells a timer of an earlier stream from this one's
    // load: an answer under way
    int64_t began = 0;
    bool is_open = false;
    bool in_body = false;
    bool is_ok = false;
    bool is_refused = false;
    bool is_chunked = false;
    size_t body_left = 0;
};

class Loop {
public:
    Loop() : epoll_(epoll_create1(0)) {
        if (epoll_ < 0) fail("epoll_create1");
    }
    void add(int fd, void* data, uint32_t events) {
        epoll_event event{};
        event.events = events;
        event.data.ptr = data;
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) < 0) fail("epoll_ctl");
    }
    void change(int fd, void* data, uint32_t events) {
        epoll_event event{};
        event.events = events;
        event.data.ptr = data;
        epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
    }
    int wait(epoll_event* events, int size, int milliseconds) { return epoll_wait(epoll_, events, size, milliseconds); }

private:
    int epoll_;
};

// Write what is waiting; false when the connection is broken.
bool flush(Loop& loop, Connection& c) {
    while (c.sent < c.out.size()) {
        ssize_t n = ::send(c.fd, c.out.data() + c.sent, c.out.size() - c.sent, MSG_NOSIGNAL);
        if (n > 0) {
            c.sent += size_t(n);
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!c.wants_write) loop.change(c.fd, &c, EPOLLIN | EPOLLOUT);
            c.wants_write = true;
            return true;
        } else {
            return false;
        }
    }
    c.out.clear();
    c.sent = 0;
    if (c.wants_write) {
        loop.change(c.fd, &c, EPOLLIN);
        c.wants_write = false;
    }
    return true;
}

// Read what is there; false when the other end is gone.
bool fill(Connection& c) {
    char buffer[65536];
    while (true) {
        ssize_t n = ::recv(c.fd, buffer, sizeof buffer, 0);
        if (n > 0) {
            c.in.append(buffer, size_t(n));
            if (size_t(n) < sizeof buffer) return true;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return true;
        } else {
            return false;
        }
    }
}

// A header's value in lower-cased headers; empty: not there.
string_view header(string_view head, string_view name) {
    size_t at = 0;
    while ((at = head.find("\r\n", at)) != string_view::npos) {
        at += 2;
        string_view line = head.substr(at, head.find("\r\n", at) - at);
        if (line.size() > name.size() && line[name.size()] == ':' &&
            strncasecmp(line.data(), name.data(), name.size()) == 0) {
            line.remove_prefix(name.size() + 1);
            while (!line.empty() && line.front() == ' ') line.remove_prefix(1);
            return line;
        }
    }
    return {};
}

string chunk(const string& text) {
    char size[32];
    snprintf(size, sizeof size, "%zx\r\n", text.size());
    return size + text + "\r\n";
}

// -- the upstream ------------------------------------------------------------------------------

const string kAnswer =
    R"({"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","system_fingerprint":null,)"
    R"("choices":[{"index":0,"message":{"role":"assistant","content":"The upstream computes nothing; it answers with )"
    R"(this sentence so that only what lies between it and the client is measured.","refusal":null},"logprobs":null,)"
    R"("finish_reason":"stop"}],"usage":{"prompt_tokens":420,"completion_tokens":24,"total_tokens":444}})";

const string kModels = R"({"object":"list","data":[{"id":"m","object":"model","created":1700000000,"owned_by":"bench"}]})";

string answer(const string& body) {
    return "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: " + std::to_string(body.size()) +
           "\r\n\r\n" + body;
}

string event(const string& content, const char* finish) {
    return "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\","
           "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"" + content + "\"},\"logprobs\":null,\"finish_reason\":" +
           finish + "}]}\n\n";
}

int64_t integer_after(string_view body, string_view name, int64_t otherwise) {
    size_t at = body.find(name);
    return at == string_view::npos ? otherwise : atoll(string(body.substr(at + name.size(), 20)).c_str());
}

int upstream(const Options& options) {
    const int64_t interval = options.number("interval-us", 20'000) * 1000;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    int one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(options.number("port", 9100)));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) fail("bind");
    if (listen(listener, 4096) < 0) fail("listen");
    Loop loop;
    loop.add(listener, nullptr, EPOLLIN);

    struct Timer {
        int64_t due;
        Connection* connection;
        uint64_t life;
        bool operator<(const Timer& other) const { return due > other.due; }
    };
    std::priority_queue<Timer> timers;
    uint64_t lives = 0;
    std::vector<Connection*> dead;

    auto drop = [&](Connection* c) {
        if (c->fd < 0) return;
        close(c->fd);
        c->fd = -1;
        c->life = 0;
        dead.push_back(c);
    };
    auto serve = [&](Connection* c) {
        while (c->left == 0) {
            size_t end = c->in.find("\r\n\r\n");
            if (end == string::npos) return;
            string_view head(c->in.data(), end + 2);
            size_t length = size_t(atoll(string(header(head, "content-length")).c_str()));
            if (c->in.size() < end + 4 + length) return;
            string_view body(c->in.data() + end + 4, length);
            if (head.substr(0, 3) == "GET") {
                c->out += answer(kModels);
            } else if (body.find("\"stream\":true") != string_view::npos) {
                c->left = int(integer_after(body, "\"max_tokens\":", 50));
                c->life = ++lives;
                c->due = now_ns() + interval;
                timers.push({c->due, c, c->life});
                c->out += "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
            } else {
                c->out += answer(kAnswer);
            }
            c->in.erase(0, end + 4 + length);
        }
    };

    epoll_event events[1024];
    while (true) {
        int wait_ms = -1;
        if (!timers.empty()) wait_ms = int(std::max<int64_t>(0, (timers.top().due - now_ns()) / 1'000'000));
        int count = loop.wait(events, 1024, wait_ms);
        for (int i = 0; i < count; ++i) {
            auto* c = static_cast<Connection*>(events[i].data.ptr);
            if (c == nullptr) {
                int fd;
                while ((fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK)) >= 0) {
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    auto* fresh = new Connection;
                    fresh->fd = fd;
                    loop.add(fd, fresh, EPOLLIN);
                }
                continue;
            }
            if (c->fd < 0) continue;
            if ((events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && !fill(*c)) {
                drop(c);
                continue;
            }
            serve(c);
            if (!flush(loop, *c)) drop(c);
        }
        int64_t now = now_ns();
        while (!timers.empty() && timers.top().due <= now) {
            Timer timer = timers.top();
            timers.pop();
            Connection* c = timer.connection;
            if (c->life != timer.life) continue;
            c->out += chunk(event("@" + std::to_string(now_ns()) + "@", "null"));
            if (--c->left == 0) {
                c->life = 0;
                c->out += chunk(event("", "\"stop\"")) + chunk("data: [DONE]\n\n") + "0\r\n\r\n";
                serve(c);
            } else {
                timers.push({timer.due + interval, c, c->life});
            }
            if (!flush(loop, *c)) drop(c);
        }
        if (timers.empty()) {  // nothing refers to them any more
            for (Connection* c : dead) delete c;
            dead.clear();
        }
    }
}

// -- the load ----------------------------------------------------------------------------------

class Load {
public:
    explicit Load(const Options& options)
        : port_(uint16_t(options.number("port", 8000))), is_stream_(options.values.count("stream") > 0) {
        std::ifstream file(options.text("body", ""), std::ios::binary);
        string body((std::istreambuf_iterator<char>(file)), {});
        request_ = "POST " + options.text("path", "/v1/chat/completions") +
                   " HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n";
        for (const string& line : options.headers) request_ += line + "\r\n";
        request_ += "content-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
        number_at_ = request_.find("@@@@@@@@");
        double rate = atof(options.text("rate", "0").c_str());
        if (rate > 0) interval_ns_ = int64_t(1e9 / rate);
    }

    int run(int connections, double seconds) {
        std::vector<std::unique_ptr<Connection>> all;
        for (int i = 0; i < connections; ++i) {
            all.push_back(std::make_unique<Connection>());
            open(*all.back());
            next(*all.back());
        }
        const int64_t began = now_ns(), end = began + int64_t(seconds * 1e9);
        int64_t due = began;
        epoll_event events[1024];
        while (true) {
            int64_t now = now_ns();
            if (now >= end) break;
            for (; interval_ns_ > 0 && due <= now; due += interval_ns_) {
                if (idle_.empty()) {
                    ++missed_;
                } else {
                    Connection* c = idle_.back();
                    idle_.pop_back();
                    begin(*c);
                }
            }
            int64_t until = interval_ns_ > 0 ? std::min(due, end) : end;
            int count = loop_.wait(events, 1024, int((until - now) / 1'000'000) + 1);
            for (int i = 0; i < count; ++i) {
                auto& c = *static_cast<Connection*>(events[i].data.ptr);
                bool is_alive = true;
                if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) is_alive = fill(c);
                if (!take(c) || (!is_alive && c.is_open)) {
                    ++errors_;
                    again(c);
                } else if (!is_alive) {
                    again(c);
                } else if (!flush(loop_, c)) {
                    ++errors_;
                    again(c);
                }
            }
        }
        double elapsed = double(now_ns() - began) / 1e9;
        report(elapsed);
        return 0;
    }

private:
    void open(Connection& c) {
        c.fd = socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(port_);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (connect(c.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) fail("connect");
        int one = 1;
        setsockopt(c.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        fcntl(c.fd, F_SETFL, O_NONBLOCK);
        loop_.add(c.fd, &c, EPOLLIN);
        c.wants_write = false;
    }

    void again(Connection& c) {
        bool was_idle = !c.is_open;
        close(c.fd);
        c = Connection{};
        open(c);
        if (!was_idle || interval_ns_ == 0) next(c);
    }

    void next(Connection& c) {
        if (interval_ns_ > 0) {
            idle_.push_back(&c);
        } else {
            begin(c);
        }
    }

    void begin(Connection& c) {
        c.began = now_ns();
        c.is_open = true;
        c.in_body = false;
        if (number_at_ != string::npos) {
            char digits[16];
            snprintf(digits, sizeof digits, "%08lld", static_cast<long long>(number_++ % 100'000'000));
            request_.replace(number_at_, 8, digits);
        }
        c.out += request_;
        flush(loop_, c);
    }

    // Read on in the answer; false when it is no good.
    bool take(Connection& c) {
        while (true) {
            if (!c.in_body) {
                size_t end = c.in.find("\r\n\r\n");
                if (end == string::npos) return true;
                string_view head(c.in.data(), end + 2);
                c.is_ok = head.substr(9, 3) == "200";
                c.is_refused = head.substr(9, 3) == "429" || head.substr(9, 3) == "503";
                c.is_chunked = header(head, "transfer-encoding").find("chunked") != string_view::npos;
                string_view length = header(head, "content-length");
                if (!c.is_chunked && length.empty()) return false;
                c.body_left = c.is_chunked ? 0 : size_t(atoll(string(length).c_str()));
                c.in.erase(0, end + 4);
                c.in_body = true;
            }
            if (c.is_chunked) {
                if (is_stream_) note_chunks(c);
                size_t last = c.in.find("0\r\n\r\n");
                while (last != string::npos && last != 0 && c.in[last - 1] != '\n') last = c.in.find("0\r\n\r\n", last + 1);
                if (last == string::npos) {
                    if (c.in.size() > 4096) c.in.erase(0, c.in.size() - 4096);
                    return true;
                }
                if (is_stream_ && c.in.rfind("[DONE]", last) == string::npos) c.is_ok = false;
                c.in.erase(0, last + 5);
            } else {
                if (c.in.size() < c.body_left) return true;
                c.in.erase(0, c.body_left);
            }
            c.is_open = false;
            if (c.is_refused) {
                refusals_.push_back(now_ns() - c.began);
            } else if (!c.is_ok) {
                ++errors_;
            } else {
                ++answers_;
                if (!is_stream_) samples_.push_back(now_ns() - c.began);
            }
            next(c);
            return true;
        }
    }

    // Every marker is the time at which the upstream sent it. What has been noted is blanked.
    void note_chunks(Connection& c) {
        int64_t now = now_ns();
        size_t at = 0;
        while ((at = c.in.find('@', at)) != string::npos) {
            size_t end = c.in.find('@', at + 1);
            if (end == string::npos) return;
            samples_.push_back(now - atoll(c.in.data() + at + 1));
            c.in[at] = c.in[end] = '#';
            at = end + 1;
        }
    }

    void report(double elapsed) {
        std::sort(samples_.begin(), samples_.end());
        std::sort(refusals_.begin(), refusals_.end());
        auto of = [](const std::vector<int64_t>& sorted, double share) {
            return sorted.empty() ? 0.0 : double(sorted[size_t(share * double(sorted.size() - 1))]) / 1e6;
        };
        auto quantile = [&](double share) { return of(samples_, share); };
        printf("{\"seconds\":%.3f,\"answers\":%lld,\"errors\":%lld,\"samples\":%zu,\"p50_ms\":%.4f,\"p90_ms\":%.4f,"
               "\"p99_ms\":%.4f,\"max_ms\":%.4f,\"refusals\":%zu,\"refusal_p50_ms\":%.4f,\"refusal_p99_ms\":%.4f,"
               "\"missed\":%lld}\n",
               elapsed, static_cast<long long>(answers_), static_cast<long long>(errors_), samples_.size(), quantile(0.5),
               quantile(0.9), quantile(0.99), quantile(1.0), refusals_.size(), of(refusals_, 0.5), of(refusals_, 0.99),
               static_cast<long long>(missed_));
    }

    Loop loop_;
    uint16_t port_;
    bool is_stream_;
    string request_;
    int64_t answers_ = 0;
    int64_t errors_ = 0;
    std::vector<int64_t> samples_;
    std::vector<int64_t> refusals_;
    std::vector<Connection*> idle_;
    int64_t interval_ns_ = 0;  // between two requests of an open loop; 0: a closed one
    int64_t missed_ = 0;
    int64_t number_ = 0;
    size_t number_at_ = string::npos;
};

}  // namespace

int main(int count, char** words) {
    string mode = count > 1 ? words[1] : "";
    Options options(count, words);
    if (mode == "upstream") return upstream(options);
    if (mode == "load") {
        Load load(options);
        return load.run(int(options.number("connections", 64)), atof(options.text("seconds", "10").c_str()));
    }
    fprintf(stderr, "usage: traffic upstream|load --port N ... (see the head of traffic.cpp)\n");
    return 2;
}
