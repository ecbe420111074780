package route_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/route"
	"github.com/tenurelib/tenure/storetest"
)

// pair is an owner that serves x, whose link to the store can fail, and another process.
type pair struct {
	owner, other *process
	link         *storetest.FaultyStore
	claim        claims.Claim
	release      func()
}

func newPair(t *testing.T, h http.HandlerFunc, cfg route.Config, ttl time.Duration) *pair {
	path := newFile(t)
	store := testkit.OpenSQLite(t, path)
	p := &pair{link: storetest.Faulty(store, nil)}
	t.Cleanup(func() { p.link.SetHook(nil) })
	p.owner = startProcess(t, p.link, "owner", cfg, claims.SessionConfig{TTL: ttl}, nil)
	p.other = startProcess(t, testkit.OpenSQLite(t, path), "other", cfg, claims.SessionConfig{TTL: ttl}, nil)
	got, err := p.owner.keys.Claim(t.Context(), "x")
	require.NoError(t, err)
	p.claim = got[0]
	p.release = p.owner.serveClaim(p.claim, h)
	return p
}

// hop returns the header of a forwarded request.
func (p *pair) hop(to string, least int64, wait int) string {
	return fmt.Sprintf("to=%s; least=%d; wait=%d", to, least, wait)
}

func TestTheOwnerJudgesEachForwardedRequest(t *testing.T) {
	ran := newRan()
	p := newPair(t, func(w http.ResponseWriter, r *http.Request) {
		ran.note(r.Header.Get("Id"), claims.ClaimFromContext(r.Context()).Token)
		w.Header().Set("Tenure-Request", "refused") // which is not for handlers
		w.Header().Set("Tenure-Token", "1")
		w.WriteHeader(421)
	}, route.Config{}, 0)
	session := p.claim.Session
	for _, header := range []string{p.hop("another", 0, 1000), p.hop(session, p.claim.Token+1, 1000), "", "to=" + session, "to=" + session + "; least=x; wait=1", "; ;=;"} {
		got := ask(p.owner.addr, "POST", "/x", "0", nil, "Tenure-Route", header)
		require.Contains(t, got.String(), "421 refused", header)
		require.Empty(t, got.body, "so that the sender can use the connection again")
	}
	require.Contains(t, ask(p.other.addr, "POST", "/x", "0", nil, "Tenure-Route", p.hop(session, 0, 100)).String(), "421 refused", "a hop is never forwarded")
	require.Contains(t, ask(p.owner.addr, "POST", "/", "0", nil, "Tenure-Route", p.hop(session, 0, 100)).String(), "421 refused", "no key, for this process")
	require.Zero(t, ran.of("0"))
	for id, got := range map[string]outcome{
		"1": ask(p.owner.addr, "POST", "/x", "1", nil, "Tenure-Route", p.hop(session, p.claim.Token, 0)),
		"2": ask(p.owner.addr, "POST", "/x", "2", nil),
		"3": ask(p.other.addr, "POST", "/x", "3", nil),
	} {
		require.Equal(t, `421  "" <nil>`, got.String(), "the handler's own 421 passes")
		require.Equal(t, strconv.FormatInt(p.claim.Token, 10), got.token)
		require.Equal(t, 1, ran.of(id))
		require.Equal(t, p.claim.Token, ran.tokens[id], "the claim in the request's context")
	}
	owner, err := p.other.route.Owner(t.Context(), "x")
	require.NoError(t, err)
	require.Equal(t, route.Owner{URL: "http://" + p.owner.addr, ID: session}, owner)
	_, err = p.other.route.Owner(t.Context(), "y")
	require.ErrorIs(t, err, tenure.ErrNotFound)
}

// A sender waits for a 100 before it sends a long body, and net/http sends none once an answer has begun.
func TestAnAnswerMayBeginBeforeALongBodyIsRead(t *testing.T) {
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	for name, protocols := range map[string]*http.Protocols{"HTTP/1": nil, "h2c": h2c} {
		t.Run(name, func(t *testing.T) {
			store := testkit.OpenSQLite(t, newFile(t))
			owner := startProcess(t, store, "owner", route.Config{}, claims.SessionConfig{}, protocols)
			transport := &http.Transport{Protocols: protocols, ExpectContinueTimeout: time.Hour}
			other := startProcess(t, store, "other", route.Config{MaxReplay: 1000, Transport: transport}, claims.SessionConfig{}, nil)
			owner.serve("x", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(http.StatusAccepted)
				if r.Header.Get("Id") == "unread" {
					return
				}
				w.(http.Flusher).Flush()
				n, err := io.Copy(io.Discard, r.Body)
				fmt.Fprint(w, n, err)
			}))
			for _, size := range []int{100_000, 1 << 20, 16 << 20} {
				for _, id := range []string{"read", "unread"} {
					want := map[string]string{"read": fmt.Sprintf(`202  "%d <nil>" <nil>`, size), "unread": `202  "" <nil>`}[id]
					for _, body := range []io.Reader{bytes.NewReader(make([]byte, size)), io.MultiReader(bytes.NewReader(make([]byte, size)))} {
						require.Equal(t, want, ask(other.addr, "POST", "/x", id, body).String())
					}
				}
			}
		})
	}
}

// If the rest of a body can't be read, net/http closes the connection at once, which discards an answer on its way. The test
// goes by when the connection is closed, because on a busy machine half a second may be too short for the client to read.
func TestAnAnswerReachesAClientThatStillSends(t *testing.T) {
	store := testkit.OpenSQLite(t, newFile(t))
	owner := startProcess(t, store, "owner", route.Config{}, claims.SessionConfig{}, nil)
	other := startProcess(t, store, "other", route.Config{MaxReplay: 1000}, claims.SessionConfig{}, nil)
	owner.serve("x", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) }))
	var clients sync.WaitGroup
	defer clients.Wait()
	for range 20 {
		clients.Go(func() {
			conn, err := net.Dial("tcp", other.addr)
			if !assert.NoError(t, err) {
				return
			}
			began, closed := time.Now(), make(chan struct{})
			go func() {
				defer close(closed)
				for part, err := "POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", error(nil); err == nil; part = "400\r\n" + strings.Repeat("x", 1024) + "\r\n" {
					_, err = io.WriteString(conn, part)
				}
			}()
			answer, err := io.ReadAll(conn)
			<-closed
			assert.GreaterOrEqual(t, time.Since(began), 900*time.Millisecond, "the owner reads for half a second, and then the answer has another")
			assert.NotContains(t, string(answer), " 502 ")
			if err == nil {
				assert.Contains(t, string(answer), "202 Accepted")
			}
			conn.Close()
		})
	}
}

func TestAKeyIsFreeOnlyWhenItsRequestsAreAnswered(t *testing.T) {
	for name, stop := range map[string]func(p *pair){
		"release": func(p *pair) { p.release() }, "shutdown": func(p *pair) { p.owner.end() },
	} {
		t.Run(name, func(t *testing.T) {
			arrived, end := make(chan context.Context), make(chan bool)
			p := newPair(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Id") == "events" {
					w.Header().Set("Content-Type", "text/event-stream")
					w.(http.Flusher).Flush()
					arrived <- r.Context()
					<-r.Context().Done()
					return
				}
				arrived <- r.Context()
				<-end
				io.WriteString(w, "done")
			}, route.Config{DrainFor: testkit.Patience}, 0)
			answers := make(chan outcome, 2)
			go func() { answers <- ask(p.other.addr, "POST", "/x", "slow", nil) }()
			slow := <-arrived
			go func() { answers <- ask(p.owner.addr, "POST", "/x", "events", nil) }()
			events := <-arrived
			stopped := make(chan struct{})
			go func() { stop(p); close(stopped) }()
			<-events.Done()
			require.ErrorIs(t, context.Cause(events), map[string]error{"release": tenure.ErrResigned, "shutdown": tenure.ErrShutdown}[name])
			require.Equal(t, `200  "" <nil>`, (<-answers).String(), "the stream ends in order")
			require.NoError(t, slow.Err(), "a request goes on while its key drains")
			got := ask(p.owner.addr, "POST", "/x", "late", nil, "Tenure-Route", p.hop(p.claim.Session, 0, 0))
			require.Contains(t, got.String(), "421 refused", "no request is admitted any more")
			free, err := p.other.keys.TryClaim(t.Context(), "x")
			require.NoError(t, err)
			require.Empty(t, free, "the key is free under a request")
			close(end)
			require.Equal(t, `200  "done" <nil>`, (<-answers).String())
			<-stopped
			_, err = p.other.keys.Claim(t.Context(), "x")
			require.NoError(t, err)
		})
	}
}

func TestAfterDrainForRequestsAreToldAndConnectionsAreCut(t *testing.T) {
	arrived, cut := make(chan context.Context), make(chan error)
	p := newPair(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			conn, buffered, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: chat\r\n\r\n")
			line, _ := buffered.ReadString('\n')
			io.WriteString(conn, line)
			arrived <- r.Context()
			_, err = buffered.ReadByte() // ignores its context
			cut <- err
			return
		}
		arrived <- r.Context()
		<-r.Context().Done()
		io.WriteString(w, "told")
	}, route.Config{DrainFor: 100 * time.Millisecond}, 0)
	answer := make(chan outcome, 1)
	go func() { answer <- ask(p.owner.addr, "POST", "/x", "1", nil) }()
	request := <-arrived

	// Through the other process, as a WebSocket comes.
	r, err := http.NewRequest("GET", "http://"+p.other.addr+"/x", nil)
	require.NoError(t, err)
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "chat")
	response, err := client.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusSwitchingProtocols, response.StatusCode)
	upgraded := response.Body.(io.ReadWriter)
	_, err = io.WriteString(upgraded, "hello\n")
	require.NoError(t, err)
	line, err := bufio.NewReader(upgraded).ReadString('\n')
	require.Equal(t, "hello\n", line, err)
	chat := <-arrived

	released := make(chan struct{})
	go func() { p.release(); close(released) }()
	<-chat.Done()
	<-request.Done()
	require.ErrorIs(t, context.Cause(request), tenure.ErrResigned)
	require.Equal(t, `200  "told" <nil>`, (<-answer).String(), "its right still stands")
	require.Error(t, <-cut)
	<-released
}

func TestNoAnswerBeginsOrEndsWellAfterTheRightHasEnded(t *testing.T) {
	testkit.Slow(t)
	const ttl = 2 * time.Second
	arrived, begun := make(chan context.Context), make(chan bool)
	var p *pair
	p = newPair(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.Header.Get("Id") {
		case "begun":
			io.WriteString(w, "part")
			w.(http.Flusher).Flush()
			begun <- true
		case "short": // net/http still has it all
			io.WriteString(w, "short")
		}
		arrived <- r.Context()
		<-r.Context().Done() // told in time, so its right still stands for a while
		testkit.Await(t, "the right ends", func() bool { return !p.owner.keys.Keeps(p.claim) })
		if r.Header.Get("Id") == "late" {
			if _, err := io.WriteString(w, "late"); err == nil {
				t.Error("it was written")
			}
		}
	}, route.Config{}, ttl)
	answers := make(chan outcome, 4)
	send := func(addr, id string) {
		go func() { o := ask(addr, "POST", "/x", id, nil); o.header = http.Header{"Id": {id}}; answers <- o }()
	}
	send(p.other.addr, "late")
	<-arrived
	send(p.owner.addr, "empty")
	<-arrived
	send(p.other.addr, "begun")
	<-begun
	told := <-arrived
	send(p.owner.addr, "short")
	<-arrived
	p.link.SetHook(testkit.Hang)
	<-told.Done()
	require.ErrorIs(t, context.Cause(told), tenure.ErrDeadline)
	for range 4 {
		got := <-answers
		switch got.header.Get("Id") {
		case "late", "empty":
			require.Contains(t, got.String(), "502 unknown", got.header)
			require.Empty(t, got.token)
		default:
			require.Error(t, got.err, "%s: %v: a clean end would look complete", got.header, got)
		}
	}
	p.link.SetHook(nil)
	p.release()
}

func TestServeIsRefusedWithoutTheRight(t *testing.T) {
	p := newPair(t, func(http.ResponseWriter, *http.Request) {}, route.Config{}, 0)
	other := testkit.Must(claims.NewKeys(p.owner.session, "other"))
	got, err := other.Claim(t.Context(), "x")
	require.NoError(t, err)
	serve := func(ctx context.Context) error { return p.owner.route.Serve(ctx, http.NotFoundHandler()) }
	for name, err := range map[string]error{
		"call Serve in a func of Keys.Do":   serve(t.Context()),
		`ctx has no claim of kind "tenant"`: other.Do(t.Context(), got[0], serve),
	} {
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.ErrorContains(t, err, name)
	}
	y, err := p.owner.keys.Claim(t.Context(), "y")
	require.NoError(t, err)
	require.NoError(t, p.owner.keys.Do(t.Context(), y[0], func(ctx context.Context) error {
		require.ErrorContains(t, p.owner.route.Serve(ctx, nil), "handler is nil")
		stopping, stop := context.WithCancel(ctx)
		first := make(chan error)
		go func() { first <- p.owner.route.Serve(stopping, http.NotFoundHandler()) }()
		testkit.Await(t, "it is served", func() bool { o, _ := p.owner.route.Owner(ctx, "y"); return o.Local })
		require.ErrorContains(t, serve(ctx), "Serve runs for it in this process")
		stop()
		return <-first
	}))

	nowhere := testkit.Must(claims.NewKeys(testkit.Must(claims.NewSession(p.link, claims.SessionConfig{})), "tenant"))
	for text, make := range map[string]func() (*route.Route, error){
		"pass the keys":       func() (*route.Route, error) { return route.Keys(nil, tenantOf, route.Config{}) },
		"pass the one whose":  func() (*route.Route, error) { return route.Shards(nil, tenantOf, route.Config{}) },
		"pass that of the":    func() (*route.Route, error) { return route.Lease(nil, route.Config{}) },
		"MaxWait -1ns is":     func() (*route.Route, error) { return route.Keys(p.owner.keys, tenantOf, route.Config{MaxWait: -1}) },
		`the label "address"`: func() (*route.Route, error) { return route.Keys(nowhere, tenantOf, route.Config{}) },
	} {
		_, err := make()
		require.ErrorIs(t, err, tenure.ErrInvalid)
		require.True(t, strings.HasPrefix(err.Error(), "route: "), err)
		require.ErrorContains(t, err, text)
	}
}
