package listen_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/tenurelib/tenure/internal/listen"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/wake"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	longest  = time.Minute     // for what takes milliseconds on an idle machine
	promptly = 2 * time.Second // less than any pause or patience of the listener
)

// warnings has the lines that a listener logs above debug level.
type warnings struct {
	mu    sync.Mutex
	lines []string
}

func (w *warnings) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, string(p))
	return len(p), nil
}

func (w *warnings) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.lines...)
}

const notOurs = "another's"

// running is a listener that runs.
type running struct {
	*listen.Listener
	t    *testing.T
	log  *warnings
	stop func() // and wait until Run has returned
}

// run runs a listener until the test ends. It connects to that URL, and notifies
// through connections of their own, unless the caller changes that.
func run(t *testing.T, url string, change func(l *listen.Listener)) *running {
	t.Helper()
	r := &running{t: t, log: &warnings{}, Listener: &listen.Listener{
		Channel: `tenure:an "odd" table`,
		Hub:     wake.NewHub[string](false),
		Connect: func(ctx context.Context) (*pgx.Conn, error) {
			return pgx.Connect(ctx, url+"&application_name=listener")
		},
	}}
	r.Key = func(payload string) (string, bool) { return payload, payload != notOurs }
	r.Logger = slog.New(slog.NewTextHandler(r.log, nil))
	r.Notify = func(ctx context.Context, payload string) error { return notify(ctx, url, r.Channel, payload) }
	if change != nil {
		change(r.Listener)
	}
	ctx, cancel := context.WithCancel(context.Background())
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		r.Run(ctx)
	}()
	r.stop = func() {
		t.Helper()
		cancel()
		select {
		case <-returned:
		case <-time.After(longest):
			t.Error("Run does not return")
		}
	}
	t.Cleanup(r.stop)
	return r
}

func notify(ctx context.Context, url, channel, payload string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, `SELECT pg_notify($1, $2)`, channel, payload)
	return err
}

// query queries the database on a connection other than the listener's.
func query(t *testing.T, url, sql string) (n int) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if err := conn.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

const (
	connections = `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'listener' AND datname = current_database()`
	terminate   = `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'listener' AND datname = current_database()`
)

func (r *running) watch(key string) *wake.Watch[string] {
	r.t.Helper()
	w := r.Hub.Watch(key)
	r.t.Cleanup(w.Stop)
	return w
}

func (r *running) awaitLive(w *wake.Watch[string], want bool) {
	r.t.Helper()
	r.await(fmt.Sprintf("Live is %v", want), func() bool { return w.Live() == want })
}

func (r *running) await(what string, ok func() bool) {
	r.t.Helper()
	for end := time.Now().Add(longest); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("waited for %s; the log:\n%s", what, r.log.all())
		}
	}
}

func (r *running) notify(url, payload string) {
	r.t.Helper()
	if err := notify(r.t.Context(), url, r.Channel, payload); err != nil {
		r.t.Fatal(err)
	}
}

func drain(w *wake.Watch[string]) (hint bool) {
	select {
	case <-w.C():
		return true
	default:
		return false
	}
}

func received(t *testing.T, what string, w *wake.Watch[string]) {
	t.Helper()
	select {
	case <-w.C():
	case <-time.After(longest):
		t.Fatalf("%s: not woken", what)
	}
}

func TestANotificationWakesThoseWhoWatchWhatItNames(t *testing.T) {
	url := testkit.PostgresURL(t)
	r := run(t, url, nil)
	payloads := []string{"type/id", `quotes ' " \ $1`, "長い\n🙂", strings.Repeat("x", 1000)}
	other := r.watch("another")
	r.awaitLive(other, true)
	drain(other)
	for _, payload := range payloads {
		w := r.watch(payload)
		for range 3 {
			r.notify(url, payload)
			received(t, payload, w)
		}
	}
	if drain(other) {
		t.Error("another was woken too")
	}
	w := r.watch(notOurs)
	r.notify(url, notOurs)
	r.notify(url, "another")
	received(t, "another", other) // by then it has heard the one before
	if drain(w) {
		t.Error("woken by what is not for this hub")
	}
	if lines := r.log.all(); len(lines) != 0 {
		t.Errorf("logged, though nothing is amiss: %q", lines)
	}
}

// What was missed between two connections cannot be known, so all watches are woken when the second
// one listens.
func TestWhatWasMissedWhileTheConnectionWasGoneIsHealedWhenItIsBack(t *testing.T) {
	url := testkit.PostgresURL(t)
	gate := make(chan struct{}, 1)
	gate <- struct{}{}
	r := run(t, url, func(l *listen.Listener) {
		connect := l.Connect
		l.Connect = func(ctx context.Context) (*pgx.Conn, error) {
			select {
			case <-gate:
				return connect(ctx)
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	})
	w, other := r.watch("a"), r.watch("b")
	r.awaitLive(w, true)
	drain(w)
	drain(other)

	if n := query(t, url, terminate); n != 1 {
		t.Fatalf("%d connections listened, want 1", n)
	}
	received(t, "the connection is gone", w)
	r.awaitLive(w, false)
	received(t, "the connection is gone", other)
	r.notify(url, "a") // no connection hears it
	if drain(w) || w.Live() {
		t.Fatal("it was heard; the test tests nothing")
	}

	gate <- struct{}{}
	received(t, "the next connection hears", w)
	received(t, "the next connection hears", other)
	r.awaitLive(w, true)
	drain(w)
	r.notify(url, "a")
	received(t, "notified through the next connection", w)
	lines := r.log.all()
	if len(lines) == 0 || !strings.Contains(lines[0], "57P01") || !strings.Contains(lines[0], r.Channel[:6]) {
		t.Errorf("the log does not tell why the connection is gone: %q", lines)
	}
}

var numbers = regexp.MustCompile(`\d+`)

func TestAListenerComesBackByItselfWhenTheServerDoes(t *testing.T) {
	server := testkit.StartPostgres(t)
	url := server.URL()
	for _, mode := range []string{"fast", "immediate"} {
		t.Run(mode, func(t *testing.T) {
			var attempts atomic.Int32
			r := run(t, url, func(l *listen.Listener) {
				connect := l.Connect
				l.Connect = func(ctx context.Context) (*pgx.Conn, error) { attempts.Add(1); return connect(ctx) }
			})
			w := r.watch("a")
			r.awaitLive(w, true)
			drain(w)
			if err := server.Stop(mode); err != nil {
				t.Fatal(err)
			}
			received(t, "the server is gone", w)
			r.awaitLive(w, false)
			retries := attempts.Load() + 4
			r.await("it has tried some times", func() bool { return attempts.Load() >= retries })
			if w.Live() {
				t.Error("live without a server")
			}
			if err := server.Start(); err != nil {
				t.Fatal(err)
			}
			received(t, "the server is back", w)
			r.awaitLive(w, true)
			r.notify(url, "a")
			received(t, "notified", w)
			// The lost connection, the server that does not answer, that it starts up, and whatever
			// else a slow server says; each is logged once, whatever the time and the port.
			said := make(map[string]bool)
			lines := r.log.all()
			for _, line := range lines {
				said[numbers.ReplaceAllString(line, "")] = true
			}
			if len(lines) == 0 || len(said) < len(lines) {
				t.Errorf("%d lines of one loss:\n%s", len(lines), strings.Join(lines, ""))
			}
			if n := query(t, url, connections); n != 1 {
				t.Errorf("it holds %d connections, want 1", n)
			}
		})
	}
}

func TestARoleWhoseSessionsMayNotIdleIsHeardOnOneConnection(t *testing.T) {
	url := testkit.PostgresURL(t)
	if query(t, url, `SELECT current_setting('server_version_num')::int`) < 140000 {
		t.Skip("the server has no idle_session_timeout")
	}
	r := run(t, url, func(l *listen.Listener) {
		l.Connect = func(ctx context.Context) (*pgx.Conn, error) {
			return pgx.Connect(ctx, url+"&application_name=listener&idle_session_timeout=3s")
		}
	})
	w := r.watch("a")
	r.awaitLive(w, true)
	drain(w)
	const idle = `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'listener' AND datname = current_database()
		AND clock_timestamp() - state_change > '3500 ms'`
	r.await("it has idled for longer than that", func() bool { return query(t, url, idle) == 1 })
	r.notify(url, "a")
	received(t, "notified", w)
	if lines := r.log.all(); len(lines) > 0 {
		t.Errorf("logged: %q", lines)
	}
}

// A pooler accepts LISTEN and forwards no notifications.
func TestAListenerThatHearsNothingIsNeverLiveAndSaysSoOnce(t *testing.T) {
	url := testkit.PostgresURL(t)
	sent := make(chan struct{}, 10)
	r := run(t, url, func(l *listen.Listener) {
		l.Notify = func(context.Context, string) error { sent <- struct{}{}; return nil }
	})
	w := r.watch("a")
	select {
	case <-sent:
	case <-time.After(longest):
		t.Fatal("it does not find out whether it hears")
	}
	for len(r.log.all()) == 0 {
		if w.Live() {
			t.Fatal("live, though nothing was heard")
		}
		r.notify(url, "a") // notifications from other connections arrive; those that it has sent itself don't
		time.Sleep(10 * time.Millisecond)
	}
	if lines := r.log.all(); len(lines) != 1 || !strings.Contains(lines[0], "pooler") {
		t.Errorf("logged %q, want one line that tells of a pooler", lines)
	}
	if w.Live() || drain(w) {
		t.Error("live or woken, though nothing was heard")
	}
	r.await("the connection is closed", func() bool { return query(t, url, connections) == 0 })
}

func TestRunReturnsPromptlyWhateverItWaitsFor(t *testing.T) {
	url := testkit.PostgresURL(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, state := range map[string]func(l *listen.Listener, reached func()){
		"connecting": func(l *listen.Listener, reached func()) {
			l.Connect = func(ctx context.Context) (*pgx.Conn, error) { reached(); <-ctx.Done(); return nil, ctx.Err() }
		},
		"connecting to a server that says nothing": func(l *listen.Listener, reached func()) {
			l.Connect = func(ctx context.Context) (*pgx.Conn, error) {
				reached()
				return pgx.Connect(ctx, "postgres://u@"+silent.Addr().String()+"/d?sslmode=disable")
			}
		},
		"notifying itself": func(l *listen.Listener, reached func()) {
			l.Notify = func(ctx context.Context, _ string) error { reached(); <-ctx.Done(); return ctx.Err() }
		},
		"finding out whether it hears": func(l *listen.Listener, reached func()) {
			l.Notify = func(context.Context, string) error { reached(); return nil }
		},
		"deaf": func(l *listen.Listener, reached func()) {
			l.Notify = func(context.Context, string) error { return nil }
			l.Logger = slog.New(slog.NewTextHandler(onLine(reached), nil))
		},
		"resting after it was refused": func(l *listen.Listener, reached func()) {
			var n atomic.Int32
			l.Connect = func(context.Context) (*pgx.Conn, error) {
				if n.Add(1) == 6 { // then it rests for some seconds
					reached()
				}
				return nil, errors.New("refused")
			}
		},
		"live": func(l *listen.Listener, reached func()) {
			w := l.Hub.Watch("a")
			go func() {
				<-w.C()
				reached()
			}()
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := goroutines()
			reached := make(chan struct{})
			r := run(t, url, func(l *listen.Listener) { state(l, sync.OnceFunc(func() { close(reached) })) })
			select {
			case <-reached:
			case <-time.After(longest):
				t.Fatalf("it does not come to that; the log: %q", r.log.all())
			}
			began := time.Now()
			r.stop()
			if took := time.Since(began); took > promptly {
				t.Errorf("Run returned after %v", took)
			}
			if r.watch("a").Live() {
				t.Error("live, although nothing listens any more")
			}
			r.await("no connection is left", func() bool { return query(t, url, connections) == 0 })
			if n := goroutines(); n > before {
				t.Errorf("%d goroutines are left of a listener that has ended", n-before)
			}
		})
	}
}

// onLine is called for each line that is logged.
type onLine func()

func (f onLine) Write(p []byte) (int, error) { f(); return len(p), nil }

// goroutines counts the goroutines that the listener or its driver has started.
func goroutines() (n int) {
	stacks := make([]byte, 1<<20)
	for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
		if strings.Contains(g, "internal/listen.(") || strings.Contains(g, "pgx/v5/pgconn") {
			n++
		}
	}
	return n
}

// The tests below use no server, so that hours pass at once.

func TestTheLogGetsALineForEachNewStateOfAffairsAndNoneForARetry(t *testing.T) {
	for name, takes := range map[string]time.Duration{
		"refused at once":                 0,
		"no answer, until patience ends":  time.Hour,
		"refused when the server is slow": 3 * time.Second,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				errRefused, errOther := errors.New("connection refused"), errors.New("no such database")
				var attempts atomic.Int32
				var now atomic.Pointer[error]
				now.Store(&errRefused)
				r := run(t, "", func(l *listen.Listener) {
					l.Connect = func(ctx context.Context) (*pgx.Conn, error) {
						attempts.Add(1)
						select {
						case <-ctx.Done():
							// What follows the end of the context takes its time too.
							time.Sleep(time.Millisecond)
						case <-time.After(takes):
						}
						return nil, *now.Load()
					}
				})
				w := r.watch("a")
				hour := func(what string, lines int) {
					t.Helper()
					attempts.Store(0)
					time.Sleep(time.Hour)
					if got := r.log.all(); len(got) != lines {
						t.Errorf("%s: %d lines in all, want %d, the first:\n%s", what, len(got), lines, strings.Join(got[:min(len(got), 5)], ""))
					}
					// At first soon, and then every 10 seconds or so.
					if n := attempts.Load(); n < 100 || n > 500 {
						t.Errorf("%s: %d attempts in an hour", what, n)
					}
				}
				hour("refused", 1)
				now.Store(&errOther)
				hour("refused for another reason", 2)
				now.Store(&errRefused)
				hour("refused again", 3)
				if w.Live() || drain(w) {
					t.Error("live or woken, without a connection")
				}
				r.stop()
			})
		})
	}
}

// fakeServer answers like a Postgres server that has nothing to report.
type fakeServer struct {
	slow time.Duration // to connect to
	mute atomic.Bool   // it accepts what is sent, and no longer answers

	mu          sync.Mutex
	connections int // ever made
	client      *pgproto3.Backend
	queries     []string
}

func (s *fakeServer) connect(ctx context.Context) (*pgx.Conn, error) {
	defer time.Sleep(s.slow)
	config, err := pgx.ParseConfig("postgres://u@127.0.0.1/d?sslmode=disable")
	if err != nil {
		return nil, err
	}
	config.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	config.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		client, server := net.Pipe()
		go s.serve(server)
		return client, nil
	}
	return pgx.ConnectConfig(ctx, config)
}

func (s *fakeServer) serve(conn net.Conn) {
	defer conn.Close()
	b := pgproto3.NewBackend(conn, conn)
	if _, err := b.ReceiveStartupMessage(); err != nil {
		return
	}
	s.mu.Lock()
	s.connections++
	s.client = b
	s.mu.Unlock()
	s.send(b, &pgproto3.AuthenticationOk{}, &pgproto3.ReadyForQuery{TxStatus: 'I'})
	for {
		message, err := b.Receive()
		if err != nil {
			return
		}
		query, ok := message.(*pgproto3.Query)
		if !ok && s.mute.Load() {
			continue // a server that hangs does not hang up either
		}
		if !ok {
			return // it says goodbye
		}
		s.mu.Lock()
		s.queries = append(s.queries, query.String)
		s.mu.Unlock()
		s.send(b, &pgproto3.CommandComplete{CommandTag: []byte("DONE")}, &pgproto3.ReadyForQuery{TxStatus: 'I'})
	}
}

func (s *fakeServer) send(b *pgproto3.Backend, messages ...pgproto3.BackendMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mute.Load() {
		return
	}
	for _, message := range messages {
		b.Send(message)
	}
	_ = b.Flush() // to one that has hung up
}

// notify notifies the client that connected last.
func (s *fakeServer) notify(_ context.Context, payload string) error {
	s.mu.Lock()
	b := s.client
	s.mu.Unlock()
	go s.send(b, &pgproto3.NotificationResponse{Payload: payload})
	return nil
}

func (s *fakeServer) made() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.connections
}

func (s *fakeServer) asked(query string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.queries {
		if strings.Contains(q, query) {
			n++
		}
	}
	return n
}

func TestAConnectionThatIsSilentIsAskedWhetherItLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &fakeServer{slow: time.Millisecond}
		r := run(t, "", func(l *listen.Listener) { l.Connect, l.Notify = server.connect, server.notify })
		w := r.watch("a")
		<-w.C()
		if !w.Live() {
			t.Fatalf("not live; the log: %q", r.log.all())
		}
		time.Sleep(time.Hour)
		if !w.Live() || drain(w) || server.made() != 1 {
			t.Errorf("after a silent hour: live %v, %d connections; want the first one to live on", w.Live(), server.made())
		}
		if n := server.asked("ping"); n < 12 || n > 400 {
			t.Errorf("it was asked %d times in an hour", n)
		}
		server.notify(t.Context(), "a")
		synctest.Wait()
		if !drain(w) {
			t.Error("after a silent hour a notification is not heard")
		}

		// From now on its packets are lost without an error.
		server.mute.Store(true)
		time.Sleep(5 * time.Minute)
		if w.Live() || !drain(w) {
			t.Error("it takes a connection for live that does not answer")
		}
		time.Sleep(time.Hour)
		if n := len(r.log.all()); n != 1 && n != 2 { // that it died, and that no other can be made
			t.Errorf("%d lines in an hour, the first:\n%s", n, strings.Join(r.log.all()[:min(n, 5)], ""))
		}
		server.mute.Store(false)
		time.Sleep(time.Minute)
		if !w.Live() || !drain(w) {
			t.Error("it does not come back")
		}
		r.stop()
	})
}

func TestRunClosesItsConnectionsEvenToAServerThatNoLongerAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &fakeServer{slow: time.Millisecond} // so that the watch is there first
		before := goroutines()
		r := run(t, "", func(l *listen.Listener) { l.Connect, l.Notify = server.connect, server.notify })
		<-r.watch("a").C()
		server.mute.Store(true)
		r.stop()
		synctest.Wait() // for what is about to end without waiting for anything
		if n := goroutines(); n > before {
			t.Errorf("%d goroutines are left of a listener that has ended", n-before)
		}
		time.Sleep(time.Minute) // they would end in the end, and the test with them
	})
}

func TestAListenerThatHearsNothingLooksAgainWithoutAWord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &fakeServer{slow: 3 * time.Second}
		var pooled atomic.Bool
		pooled.Store(true)
		r := run(t, "", func(l *listen.Listener) {
			l.Connect = server.connect
			l.Notify = func(ctx context.Context, payload string) error {
				if pooled.Load() {
					return nil
				}
				return server.notify(ctx, payload)
			}
		})
		w := r.watch("a")
		time.Sleep(6 * time.Hour)
		if w.Live() || drain(w) {
			t.Error("live or woken, though nothing is ever heard")
		}
		if lines := r.log.all(); len(lines) != 1 {
			t.Errorf("%d lines in six hours, want 1; the first:\n%s", len(lines), strings.Join(lines[:min(len(lines), 5)], ""))
		}
		if made, left := server.made(), server.asked("UNLISTEN"); made < 6 || made > 60 || left < made-1 { // the last one may be under way
			t.Errorf("%d connections were made in six hours, of which %d were left without a LISTEN", made, left)
		}
		pooled.Store(false)
		time.Sleep(time.Hour)
		if !w.Live() || !drain(w) {
			t.Error("it does not notice that the pooler is gone")
		}
		r.stop()
	})
}
