package route_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/route"
)

// listen serves a handler until the test ends, and returns its address.
func listen(t *testing.T, h http.Handler) (addr string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := &http.Server{Handler: h}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	return listener.Addr().String()
}

// ownedBy claims tenants for a session without a route, whose label names an address.
func ownedBy(t *testing.T, path, address string, tenants ...string) *claims.Keys {
	session := testkit.Must(claims.NewSession(testkit.OpenSQLite(t, path), claims.SessionConfig{Labels: map[string]string{"address": address}, Logger: testkit.Quiet}))
	keys := testkit.Must(claims.NewKeys(session, "tenant"))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- session.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	_, err := keys.Claim(t.Context(), tenants...)
	require.NoError(t, err)
	return keys
}

func TestARequestIsSentAgainOnlyIfItNeverRanOrMayRunTwice(t *testing.T) {
	testkit.Slow(t)
	lost := func(w http.ResponseWriter) { panic(http.ErrAbortHandler) }
	mine := func(w http.ResponseWriter) { w.WriteHeader(http.StatusMisdirectedRequest); io.WriteString(w, "mine") }
	unknown := func(w http.ResponseWriter) {
		w.Header().Set("Tenure-Request", "unknown")
		w.WriteHeader(http.StatusBadGateway)
	}
	ok := func(w http.ResponseWriter) { w.Header().Set("Tenure-Token", "9"); io.WriteString(w, "ok") }
	var refuse func(w http.ResponseWriter)
	for name, test := range map[string]struct {
		does   []func(http.ResponseWriter) // with one request after another; nil: refuses it before it runs
		method string
		header []string
		want   string
		runs   int
	}{
		"refused": {
			does: []func(http.ResponseWriter){refuse, refuse, ok}, want: `200  "ok" <nil>`, runs: 1},
		"a handler's own 421": {
			does: []func(http.ResponseWriter){mine, ok}, want: `421  "mine" <nil>`, runs: 1},
		"no answer to a POST": {
			does: []func(http.ResponseWriter){lost, ok}, want: "502 unknown", runs: 1},
		"no answer to a PUT": {
			does: []func(http.ResponseWriter){lost, ok}, method: "PUT", want: "502 unknown", runs: 1},
		"no answer to a GET": {
			does: []func(http.ResponseWriter){lost, ok}, method: "GET", want: `200  "ok" <nil>`, runs: 2},
		"no answer to a POST with an idempotency key": {
			does: []func(http.ResponseWriter){lost, ok}, header: []string{"Idempotency-Key", "1"}, want: `200  "ok" <nil>`, runs: 2},
		"no answer to a PATCH that the config calls idempotent": {
			does: []func(http.ResponseWriter){lost, ok}, method: "PATCH", want: `200  "ok" <nil>`, runs: 2},
		"no answer to a GET, and then it is refused": {
			does: []func(http.ResponseWriter){lost, refuse}, method: "GET", want: "502 unknown", runs: 1},
		"no answer to a GET, twice": { // it may be what ends its owners
			does: []func(http.ResponseWriter){lost, lost, ok}, method: "GET", want: "502 unknown", runs: 2},
		"unknown to the owner": {
			does: []func(http.ResponseWriter){unknown, ok}, want: "502 unknown", runs: 1},
		"unknown to the owner of a GET": {
			does: []func(http.ResponseWriter){unknown, ok}, method: "GET", want: `200  "ok" <nil>`, runs: 2},
		"unknown to the owner, for gRPC": {
			does: []func(http.ResponseWriter){unknown}, header: []string{"Content-Type", "application/grpc"}, want: "200 unknown", runs: 1},
	} {
		t.Run(name, func(t *testing.T) {
			ran, n := newRan(), atomic.Int32{}
			path := newFile(t)
			ownedBy(t, path, listen(t, ownerFunc(func(w http.ResponseWriter, r *http.Request) {
				if body, err := io.ReadAll(r.Body); err != nil || test.method != "GET" && string(body) != "body" {
					t.Errorf("the body is %q, %v", body, err)
				}
				do := test.does[min(int(n.Add(1)), len(test.does))-1]
				if do == nil {
					w.Header().Set("Tenure-Request", "refused")
					w.WriteHeader(http.StatusMisdirectedRequest)
					return
				}
				ran.note(r.Header.Get("Id"), 0)
				do(w)
			})), "x")
			front := startProcess(t, testkit.OpenSQLite(t, path), "front",
				route.Config{MaxWait: 2 * time.Second, Idempotent: func(r *http.Request) bool { return r.Method == "PATCH" }}, claims.SessionConfig{}, nil)
			var body io.Reader
			if test.method == "" {
				test.method = "POST"
			}
			if test.method != "GET" {
				body = strings.NewReader("body")
			}
			got := ask(front.addr, test.method, "/x", "1", body, test.header...)
			require.Contains(t, got.String(), test.want)
			require.Equal(t, test.runs, ran.of("1"), "runs")
			if strings.Contains(name, "gRPC") {
				require.Equal(t, "2", got.header.Get("Grpc-Status"))
			}
		})
	}
}

// Whoever has got the address of an owner can answer in its place, until the owner is looked up again.
func TestATokenThatAStrangerHasMadeUpIsForgotten(t *testing.T) {
	path := newFile(t)
	ownedBy(t, path, listen(t, ownerFunc(func(w http.ResponseWriter, r *http.Request) {
		const huge = "9223372036854775807"
		if strings.Contains(r.Header.Get("Tenure-Route"), huge) { // as every owner would
			w.Header().Set("Tenure-Request", "refused")
			w.WriteHeader(http.StatusMisdirectedRequest)
			return
		}
		w.Header().Set("Tenure-Token", huge)
	})), "x")
	front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{}, claims.SessionConfig{}, nil)
	for range 3 {
		require.Equal(t, http.StatusOK, ask(front.addr, "POST", "/x", "1", nil).status)
	}
}

func TestARequestThatCannotBeSentIsRefusedWhenItHasWaited(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed.Close()
	plain := listen(t, http.NotFoundHandler())
	for name, address := range map[string]string{"nothing listens": closed.Addr().String(), "TLS fails": "https://" + plain, "no address": ""} {
		t.Run(name, func(t *testing.T) {
			path := newFile(t)
			ownedBy(t, path, address, "x")
			front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{MaxWait: 300 * time.Millisecond}, claims.SessionConfig{}, nil)
			got := ask(front.addr, "POST", "/x", "1", nil)
			require.Contains(t, got.String(), "503 refused")
			require.Equal(t, "1", got.header.Get("Retry-After"))
			got = ask(front.addr, "POST", "/x", "1", nil, "Content-Type", "application/grpc+proto")
			require.Contains(t, got.String(), "200 refused")
			require.Equal(t, "14", got.header.Get("Grpc-Status"))
			require.Equal(t, http.StatusNotFound, ask(front.addr, "POST", "/", "1", nil).status, "no key")
			require.Equal(t, http.StatusNotFound, ask(front.addr, "POST", "/%ff", "1", nil).status, "no valid key")
		})
	}
}

// told is a transport that calls hooks of httptrace, and fails the first time.
type told struct {
	hooks string
	calls atomic.Int32
}

func (tr *told) RoundTrip(r *http.Request) (*http.Response, error) {
	trace := httptrace.ContextClientTrace(r.Context())
	for _, hook := range tr.hooks {
		switch hook {
		case 'C':
			trace.GetConn("10.0.0.1:1")
		case 'W':
			trace.WroteHeaders()
		case 'R':
			_, _ = r.Body.Read(make([]byte, 1))
		}
	}
	if tr.calls.Add(1) == 1 {
		return nil, errors.New("no answer")
	}
	return &http.Response{StatusCode: 200, Request: r, Body: http.NoBody, Header: http.Header{"Tenure-Token": {"9"}}}, nil
}

func TestARequestIsUnsentOnlyIfItsTransportSaysSo(t *testing.T) {
	for hooks, want := range map[string]string{
		"":    "502 unknown", // the transport tells nothing
		"C":   "200 ",
		"CW":  "502 unknown",
		"CWC": "200 ",        // repeated by the transport on another connection, where it was not written
		"CR":  "503 refused", // the beginning of the body is missing
	} {
		t.Run(hooks, func(t *testing.T) {
			path, transport := newFile(t), &told{hooks: hooks}
			ownedBy(t, path, "h2c://10.0.0.1:1", "x")
			front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{Transport: transport}, claims.SessionConfig{}, nil)
			require.Contains(t, ask(front.addr, "POST", "/x", "1", io.MultiReader(strings.NewReader("long"))).String(), want)
			require.EqualValues(t, map[bool]int{true: 2, false: 1}[want == "200 "], transport.calls.Load())
		})
	}
}

// lonely is a transport whose first connection breaks under a request, and which gets no other.
type lonely struct{ hooks string }

func (tr *lonely) RoundTrip(r *http.Request) (*http.Response, error) {
	_, err := (&told{hooks: tr.hooks}).RoundTrip(r)
	tr.hooks = "C"
	return nil, err
}

func TestWhatItsTransportRepeatsIsNotRefused(t *testing.T) {
	for hooks, want := range map[string]string{"CWC": "502 unknown", "CC": "503 refused"} {
		path := newFile(t)
		ownedBy(t, path, "10.0.0.1:1", "x")
		front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{Transport: &lonely{hooks}, MaxWait: 300 * time.Millisecond}, claims.SessionConfig{}, nil)
		require.Contains(t, ask(front.addr, "GET", "/x", "1", nil).String(), want, hooks)
	}
}

func TestABodyIsSentAgainUpToItsLimitAndOtherwiseRefused(t *testing.T) {
	path, refusals := newFile(t), atomic.Int32{}
	var got bytes.Buffer
	ownedBy(t, path, listen(t, ownerFunc(func(w http.ResponseWriter, r *http.Request) {
		got.Reset()
		io.Copy(&got, r.Body)
		if refusals.Add(-1) >= 0 {
			w.Header().Set("Tenure-Request", "refused")
			w.WriteHeader(http.StatusMisdirectedRequest)
		}
	})), "x")
	front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{MaxReplay: 1000}, claims.SessionConfig{}, nil)
	for _, size := range []int{1, 999, 1000, 1001, 100_000} {
		for _, chunked := range []bool{false, true} {
			sent := bytes.Repeat([]byte("x"), size)
			var body io.Reader = bytes.NewReader(sent)
			if chunked {
				body = io.MultiReader(body)
			}
			refusals.Store(2)
			answer := ask(front.addr, "POST", "/x", "1", body)
			if size <= 1000 && !chunked {
				require.Equal(t, 200, answer.status, "%d bytes", size)
				require.Equal(t, sent, got.Bytes())
			} else {
				require.Contains(t, answer.String(), "503 refused", "%d bytes", size)
			}
		}
	}
}

// Keep-alive connections and streams end under requests when a server stops. Go's transport repeats by itself what
// HTTP/2 says was not processed.
func TestOwnersThatStopTheirServersRunNoRequestTwice(t *testing.T) {
	testkit.Slow(t)
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	h2c.SetHTTP1(true)
	for name, protocols := range map[string]*http.Protocols{"HTTP/1": nil, "h2c": h2c} {
		t.Run(name, func(t *testing.T) {
			path, ran := newFile(t), newRan()
			front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{MaxWait: testkit.Patience}, claims.SessionConfig{}, nil)
			var mu sync.Mutex
			fates := map[string]int{}
			var clients sync.WaitGroup
			var stop atomic.Bool
			for c := range 8 {
				clients.Go(func() {
					for n := 0; !stop.Load(); n++ {
						id := fmt.Sprint(c, "-", n)
						got := ask(front.addr, "POST", "/x", id, strings.NewReader("body"))
						mu.Lock()
						fates[got.fate]++
						mu.Unlock()
						if times := ran.of(id); times > 1 || got.fate == "" && (got.err != nil || times != 1) || got.fate == "refused" && times > 0 {
							t.Errorf("%s ran %d times: %v", id, times, got)
						}
					}
				})
			}
			h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { ran.note(r.Header.Get("Id"), 0) })
			for range 10 {
				owner := startProcess(t, testkit.OpenSQLite(t, path), "owner", route.Config{}, claims.SessionConfig{}, protocols)
				owner.serve("x", h)
				time.Sleep(50 * time.Millisecond) // some requests
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				owner.server.Shutdown(ctx) // under requests, unlike route.Shutdown
				cancel()
				owner.end()
			}
			stop.Store(true)
			owner := startProcess(t, testkit.OpenSQLite(t, path), "owner", route.Config{}, claims.SessionConfig{}, protocols)
			owner.serve("x", h)
			clients.Wait()
			t.Log(fates)
			// A connection that breaks before its last frames are read takes the answers of all eight clients with it. A
			// busy machine sees that once; HTTP/1 has 30 and more.
			if name == "h2c" && fates["unknown"] >= 24 {
				t.Errorf("%d requests are unknown", fates["unknown"])
			}
		})
	}
}

// An owner that refuses before it reads the body leaves it to the next one. The client, which asks for no 100, gets none. The headers that
// a handler in front of the route has set stay.
func TestALongBodyGoesToTheNextOwnerUntilOneHasReadFromIt(t *testing.T) {
	testkit.Slow(t)
	for _, size := range []int{1001, 100_000, 5 << 20} {
		for _, chunked := range []bool{false, true} {
			path := newFile(t)
			var ran, sends atomic.Int32
			sent := bytes.Repeat([]byte("x"), size)
			ownedBy(t, path, listen(t, ownerFunc(func(w http.ResponseWriter, r *http.Request) {
				if n := sends.Add(1); n < 4 {
					w.Header().Set("Tenure-Request", "refused")
					w.Header().Set("Connection", map[bool]string{true: "close", false: "keep-alive"}[n == 1])
					w.WriteHeader(http.StatusMisdirectedRequest)
					return
				}
				ran.Add(1)
				w.Header().Set("Link", "early")
				w.WriteHeader(http.StatusEarlyHints)
				if got, err := io.ReadAll(r.Body); err != nil || !bytes.Equal(got, sent) {
					t.Errorf("it has read %d bytes of %d: %v", len(got), size, err)
				}
			})), "x")
			front := startProcess(t, testkit.OpenSQLite(t, path), "front", route.Config{MaxReplay: 1000, MaxWait: testkit.Patience}, claims.SessionConfig{}, nil)
			addr := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Set-Before", "yes")
				r.TransferEncoding = nil // as on HTTP/2
				front.route.ServeHTTP(w, r)
			}))
			method, body := "POST", io.Reader(bytes.NewReader(sent))
			if chunked {
				method, body = "DELETE", io.MultiReader(body) // of which net/http would read a byte before it sends the headers
			}
			r, err := http.NewRequest(method, "http://"+addr+"/x", body)
			require.NoError(t, err)
			var got1xx []string
			answer, err := client.Do(r.WithContext(httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
				Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
					got1xx = append(got1xx, fmt.Sprint(code, " ", header.Get("Link")))
					return nil
				},
			})))
			require.NoError(t, err)
			answer.Body.Close()
			require.Equal(t, 200, answer.StatusCode)
			require.EqualValues(t, 1, ran.Load())
			require.EqualValues(t, 4, sends.Load())
			require.Equal(t, []string{"103 early"}, got1xx)
			require.Equal(t, []string{"yes"}, answer.Header["Set-Before"])
			require.Equal(t, []string{"early"}, answer.Header["Link"])
		}
	}
}
