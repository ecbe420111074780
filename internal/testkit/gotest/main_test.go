package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhatWasSkippedIsCountedByItsReasonAndWhatFailedIsShown(t *testing.T) {
	var out bytes.Buffer
	s := newSummary(&out)
	require.NoError(t, s.read(strings.NewReader(`
{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: of no interest\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:2: slow\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"--- SKIP: TestB (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestC/1","Output":"        c_test.go:3: slow\n"}
{"Action":"skip","Package":"p","Test":"TestC/1"}
{"Action":"skip","Package":"p","Test":"TestD"}
{"Action":"pass","Package":"p","Elapsed":1.25}
{"Action":"skip","Package":"without tests"}
{"Action":"output","Package":"q","Test":"TestE","Output":"    e_test.go:4: a promise was broken\n"}
{"Action":"fail","Package":"q","Test":"TestE"}
{"Action":"output","Package":"q","Output":"repeat it with go test . -seed=2\n"}
{"Action":"fail","Package":"q","Elapsed":2}
{"Action":"build-output","ImportPath":"r","Output":"undefined: x\n"}
{"Action":"fail","Package":"r"}
`)))
	s.print()
	require.Equal(t, `ok    p 1.2s
FAIL  q 2.0s
          e_test.go:4: a promise was broken
      repeat it with go test . -seed=2
undefined: x
FAIL  r 0.0s

Skipped:
    2  slow
    1  no reason given
failed: q TestE
failed: r
repeat it with go test . -seed=2
`, out.String())
	require.Equal(t, 1, s.passed)
}

func TestWhatIsNoEventIsShown(t *testing.T) {
	require.ErrorContains(t, newSummary(&bytes.Buffer{}).read(strings.NewReader("go: no such tool")), "go: no such tool")
}
