package natstenure_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// cluster has three servers, each in a separate process, that reach each other through proxies, two
// for each pair.
type cluster struct {
	servers []*child
	links   map[[2]int]*rig.Proxy
	stream  string
}

func startCluster(t testing.TB) *cluster { t.Helper(); return startClusterOf(t, "") }

// startClusterOf is startCluster for servers of an older version, which reach each other directly.
func startClusterOf(t testing.TB, binary string) *cluster {
	t.Helper()
	c := &cluster{links: make(map[[2]int]*rig.Proxy), stream: "TENURE"}
	for range 3 {
		c.servers = append(c.servers, &child{binary: binary, dir: quickDir(t), peers: []string{freePort(t)}})
	}
	for i, s := range c.servers {
		for j, other := range c.servers {
			switch {
			case i == j:
			case s.binary != "":
				s.peers = append(s.peers, other.peers[0])
			default:
				link, err := rig.NewProxy("127.0.0.1:"+other.peers[0], nil)
				require.NoError(t, err)
				t.Cleanup(link.Close)
				c.links[[2]int{i, j}] = link
				_, port, err := net.SplitHostPort(link.Addr())
				require.NoError(t, err)
				s.peers = append(s.peers, port)
			}
		}
	}
	for _, s := range c.servers {
		s.start(t)
		t.Cleanup(s.kill)
	}
	js := connect(t, c.servers[0].url)
	testkit.Await(t, "the cluster can replicate", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "READY", Replicas: 3, Storage: jetstream.MemoryStorage})
		return err == nil
	})
	return c
}

// urls returns the addresses for clients of all servers.
func (c *cluster) urls() string { return c.others(nil) }

// others returns the addresses for clients of all servers but one.
func (c *cluster) others(but *child) string {
	var all []string
	for _, s := range c.servers {
		if s != but {
			all = append(all, s.url)
		}
	}
	return strings.Join(all, ",")
}

// isolate cuts a server off from the others, but not from its clients.
func (c *cluster) isolate(which *child) {
	for ends, link := range c.links {
		if c.servers[ends[0]] == which || c.servers[ends[1]] == which {
			link.Set(rig.Weather{Refuse: true})
		}
	}
}

func (c *cluster) heal() {
	for _, link := range c.links {
		link.Set(rig.Weather{})
	}
}

// leads returns the server that leads the stream, if there is one.
func (c *cluster) leads(t testing.TB) *child {
	t.Helper()
	for _, s := range c.servers {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		stream, err := connect(t, s.url).Stream(ctx, c.stream)
		cancel()
		if err != nil {
			continue
		}
		for _, s := range c.servers {
			if stream.CachedInfo().Cluster.Leader == "test-"+s.peers[0] {
				return s
			}
		}
	}
	return nil
}

// leader returns the server that leads the stream once there is one.
func (c *cluster) leader(t testing.TB) (leader *child) {
	t.Helper()
	testkit.Await(t, "the stream has a leader", func() bool { leader = c.leads(t); return leader != nil })
	return leader
}

// awaitWhole waits until both other servers follow the stream's leader.
func (c *cluster) awaitWhole(t testing.TB) {
	t.Helper()
	testkit.Await(t, "all servers follow", func() bool {
		leads := c.leads(t)
		if leads == nil {
			return false
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		stream, err := connect(t, leads.url).Stream(ctx, c.stream)
		if err != nil {
			return false
		}
		is := stream.CachedInfo().Cluster
		following := 0
		for _, peer := range is.Replicas {
			if peer.Current && !peer.Offline {
				following++
			}
		}
		return is.Leader == "test-"+leads.peers[0] && following == 2
	})
}
