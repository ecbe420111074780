package natstenure_test

import (
	"bytes"
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
)

// payload is what the dead process has sent last.
const payload = "of the dead"

// lateConn is a connection that keeps what its client sends, from the payload on. It outlives its client, as what a
// process has sent outlives the process.
type lateConn struct {
	net.Conn
	reading sync.Mutex // held while the client reads

	mu   sync.Mutex
	kept []byte
	dead bool // the client
}

// Dial implements [nats.CustomDialer].
func (c *lateConn) Dial(network, address string) (_ net.Conn, err error) {
	c.Conn, err = net.Dial(network, address)
	return c, err
}

func (c *lateConn) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.Conn.Read(b)
}

func (c *lateConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead { // the client says goodbye
		return len(b), nil
	}
	if c.kept == nil && !bytes.Contains(b, []byte(payload)) {
		return c.Conn.Write(b)
	}
	c.kept = append(c.kept, b...)
	return len(b), nil
}

// Close ends the client's reads, and nothing else.
func (c *lateConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return nil
	}
	c.dead = true
	return c.SetReadDeadline(time.Unix(1, 0))
}

func (c *lateConn) keeps() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.kept != nil
}

// deliver sends the server what was kept, and returns its answer, which contains one of the texts.
func (c *lateConn) deliver(t *testing.T, texts ...string) string {
	c.reading.Lock() // the client reads no more
	defer c.reading.Unlock()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
	c.mu.Lock()
	kept := c.kept
	c.mu.Unlock()
	_, err := c.Conn.Write(kept)
	require.NoError(t, err)
	var answer []byte
	for {
		some := make([]byte, 4096)
		n, err := c.Conn.Read(some)
		require.NoError(t, err, "%s", answer)
		answer = append(answer, some[:n]...)
		for _, text := range texts {
			if bytes.Contains(answer, []byte(text)) {
				return text
			}
		}
	}
}

// A process is killed when it has just sent an acquire, and the server is slow. If nobody overtakes the acquire, it succeeds, or
// this would prove nothing.
func TestAnAcquireOfADeadProcessIsRefusedOnceItIsOvertaken(t *testing.T) {
	t.Parallel()
	url := start(t).ClientURL()
	const refused, done = "wrong last sequence", `"seq":`
	for name, cfg := range map[string]natstenure.Config{"stream": {}, "bucket": {Bucket: "b"}} {
		for _, before := range []string{"the first", "a later"} {
			for _, overtakes := range []bool{true, false} {
				t.Run(name+" "+before, func(t *testing.T) {
					late := new(lateConn)
					dead := openOn(t, connect(t, url, nats.SetCustomDialer(late), nats.NoReconnect()), cfg)
					witness := openOn(t, connect(t, url), cfg)
					obj := tenure.Object{Key: tenure.Key{Type: "lease", ID: t.Name()}, Name: t.Name(), Payload: []byte(payload)}
					if before == "a later" {
						is, err := witness.PutIf(t.Context(), obj, tenure.IfAbsent())
						require.NoError(t, err)
						testkit.WantErr(t, witness.Overtake(t.Context(), obj.Key), tenure.ErrExists)
						testkit.WantErr(t, witness.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(is.Version)), nil)
					}
					ctx, cancel := context.WithCancel(t.Context())
					sent := make(chan struct{})
					go func() {
						defer close(sent)
						_, _ = dead.PutIf(ctx, obj, tenure.IfAbsent())
					}()
					testkit.Await(t, "it is sent", late.keeps)
					cancel()
					<-sent
					late.Close()
					want := done
					if overtakes {
						want = refused
						for range 2 {
							testkit.WantErr(t, witness.Overtake(t.Context(), obj.Key), nil)
						}
					}
					require.Equal(t, want, late.deliver(t, refused, done))
					_, err := witness.Get(t.Context(), obj.Key)
					testkit.WantErr(t, err, map[bool]error{true: tenure.ErrNotFound}[overtakes])
					_, err = witness.PutIf(t.Context(), obj, tenure.Unconditional())
					testkit.WantErr(t, err, nil)
				})
			}
		}
	}
}
