package integrations

import (
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	coder "github.com/coder/websocket"
	gorilla "github.com/gorilla/websocket"
	xnet "golang.org/x/net/websocket"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/route"
)

// socket is a WebSocket of any library.
type socket struct {
	send    func(ctx context.Context, text string) error
	receive func(ctx context.Context) (string, error)
	close   func() // with status 1012, if the library has it
}

func ofCoder(c *coder.Conn) socket {
	return socket{
		send: func(ctx context.Context, text string) error { return c.Write(ctx, coder.MessageText, []byte(text)) },
		receive: func(ctx context.Context) (string, error) {
			_, text, err := c.Read(ctx)
			return string(text), err
		},
		close: func() { _ = c.Close(coder.StatusServiceRestart, "moved") },
	}
}

func ofGorilla(c *gorilla.Conn) socket {
	return socket{
		send: func(_ context.Context, text string) error { return c.WriteMessage(gorilla.TextMessage, []byte(text)) },
		receive: func(context.Context) (string, error) {
			_, text, err := c.ReadMessage()
			return string(text), err
		},
		close: func() {
			_ = c.WriteControl(gorilla.CloseMessage, gorilla.FormatCloseMessage(gorilla.CloseServiceRestart, "moved"), time.Now().Add(time.Second))
			_ = c.Close()
		},
	}
}

func ofXNet(c *xnet.Conn) socket {
	return socket{
		send: func(_ context.Context, text string) error { return xnet.Message.Send(c, text) },
		receive: func(context.Context) (text string, err error) {
			err = xnet.Message.Receive(c, &text)
			return text, err
		},
		close: func() { _ = c.Close() },
	}
}

var webSocketLibraries = map[string]struct {
	serve func(answer func(context.Context, socket)) http.Handler
	dial  func(ctx context.Context, addr string) (socket, error)
	moved func(error) bool // the error says that the server has closed with status 1012
}{
	"coder": {
		serve: func(answer func(context.Context, socket)) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if c, err := coder.Accept(w, r, nil); err == nil {
					answer(r.Context(), ofCoder(c))
				}
			})
		},
		dial: func(ctx context.Context, addr string) (socket, error) {
			c, _, err := coder.Dial(ctx, "ws://"+addr+"/x", nil)
			return ofCoder(c), err
		},
		moved: func(err error) bool { return coder.CloseStatus(err) == coder.StatusServiceRestart },
	},
	"gorilla": {
		serve: func(answer func(context.Context, socket)) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if c, err := new(gorilla.Upgrader).Upgrade(w, r, nil); err == nil {
					answer(r.Context(), ofGorilla(c))
				}
			})
		},
		dial: func(ctx context.Context, addr string) (socket, error) {
			c, _, err := gorilla.DefaultDialer.DialContext(ctx, "ws://"+addr+"/x", nil)
			return ofGorilla(c), err
		},
		moved: func(err error) bool { return gorilla.IsCloseError(err, gorilla.CloseServiceRestart) },
	},
	"x/net": {
		serve: func(answer func(context.Context, socket)) http.Handler {
			return xnet.Handler(func(c *xnet.Conn) { answer(c.Request().Context(), ofXNet(c)) })
		},
		dial: func(_ context.Context, addr string) (socket, error) {
			c, err := xnet.Dial("ws://"+addr+"/x", "", "http://"+addr)
			return ofXNet(c), err
		},
		moved: func(err error) bool { return err != nil }, // it tells no status
	},
}

// process is a process that serves the key x, or forwards its requests.
type process struct {
	addr  string
	keys  *claims.Keys
	route *route.Route
}

func startProcess(t *testing.T, path string) process {
	store, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{Shared: true})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	must(t, claims.Migrate(t.Context(), store))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	session, err := claims.NewSession(store, claims.SessionConfig{
		PollInterval: 20 * time.Millisecond, Labels: map[string]string{"address": listener.Addr().String()},
	})
	must(t, err)
	p := process{addr: listener.Addr().String()}
	p.keys, err = claims.NewKeys(session, "chat")
	must(t, err)
	p.route, err = route.Keys(p.keys, func(*http.Request) string { return "x" }, route.Config{})
	must(t, err)
	server := &http.Server{Handler: p.route}
	go server.Serve(listener)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- session.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		must(t, <-ended)
		server.Close()
		store.Close()
	})
	return p
}

// serve claims x, and has h answer its requests until another process asks for it.
func (p process) serve(t *testing.T, h http.Handler) (ended chan error) {
	got, err := p.keys.Claim(limited(t), "x")
	must(t, err)
	ended = make(chan error, 1)
	go func() {
		ended <- p.keys.Do(context.Background(), got[0], func(ctx context.Context) error { return p.route.Serve(ctx, h) })
	}()
	return ended
}

// A WebSocket goes through another process, in both directions, and is told with status 1012 that its key moves. The client connects
// again, and is then with the new owner.
func TestWebSocketsFollowTheirKey(t *testing.T) {
	for name, library := range webSocketLibraries {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "chat.db")
			front, first, second := startProcess(t, path), startProcess(t, path), startProcess(t, path)
			chat := func(name string) http.Handler {
				return library.serve(func(ctx context.Context, s socket) {
					stop := context.AfterFunc(ctx, s.close) // the key moves
					defer stop()
					_ = s.send(context.Background(), "welcome to "+name)
					for {
						text, err := s.receive(context.Background())
						if err != nil {
							return
						}
						_ = s.send(context.Background(), name+" has heard "+text)
					}
				})
			}
			connect := func(want string) socket {
				var s socket
				var err error
				for range 100 { // a new owner may still be about to serve
					if s, err = library.dial(limited(t), front.addr); err == nil {
						break
					}
				}
				must(t, err)
				hear(t, s, "welcome to "+want)
				for _, text := range []string{"hello", "again"} {
					must(t, s.send(limited(t), text))
					hear(t, s, want+" has heard "+text)
				}
				return s
			}
			ended := first.serve(t, chat("first"))
			one, two := connect("first"), connect("first")
			must(t, second.keys.RequestRelease(limited(t), "x"))
			for _, s := range []socket{one, two} {
				if _, err := s.receive(limited(t)); !library.moved(err) {
					t.Errorf("the client is told %v", err)
				}
				s.close()
			}
			if err := <-ended; err != nil && !errors.Is(err, tenure.ErrResigned) {
				t.Error(err)
			}
			second.serve(t, chat("second"))
			connect("second").close()
		})
	}
}

func hear(t *testing.T, s socket, want string) {
	t.Helper()
	text, err := s.receive(limited(t))
	must(t, err)
	if text != want {
		t.Fatalf("%q, want %q", text, want)
	}
}
