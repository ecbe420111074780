package statuspage

import (
	"cmp"
	"embed"
	"fmt"
	"html/template"
	"slices"
	"time"
)

//go:embed *.html
var files embed.FS

// newPage returns the page in a file, which shows a slice of statuses. It may call the own funcs in
// addition to the common ones.
func newPage(file string, own template.FuncMap) *template.Template {
	funcs := template.FuncMap{
		"now": time.Now, "since": since, "span": span,
		"utc":  func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") },
		"part": func(d, of time.Duration) float64 { return float64(d) / float64(max(1, of)) },
		"rest": func(d, of time.Duration) float64 { return 1 - float64(d)/float64(max(1, of)) },
	}
	return template.Must(template.New(file).Funcs(funcs).Funcs(own).ParseFS(files, file, "style.html"))
}

// state sums up a status in one word: the worst one that applies. Severity is the class of its
// colour.
type state struct {
	Word     string
	Severity severity
}

type severity int

const (
	good severity = iota
	wait
	bad
)

func (s severity) String() string { return [...]string{"good", "wait", "bad"}[s] }

// worstFirst returns a func that sorts the statuses that need attention to the front.
func worstFirst[S any](of func(S) state) func([]S) []S {
	return func(all []S) []S {
		return slices.SortedStableFunc(slices.Values(all), func(a, b S) int { return cmp.Compare(of(b).Severity, of(a).Severity) })
	}
}

// since returns how long ago t was, or "" if t is zero.
func since(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return span(time.Since(t))
}

// span formats a duration for people, always in the same way: 2.3 ms, 150 ms, 4.2 s, 44 s,
// 3 min 12 s, 5 h 3 min, 12 d 4 h.
func span(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d <= 0: // another replica's clock may be ahead
		return "0 s"
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", max(d, time.Millisecond/10).Truncate(time.Millisecond/10).Seconds()*1000)
	case d < time.Second:
		return fmt.Sprintf("%d ms", d/time.Millisecond)
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Truncate(time.Second/10).Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", d/time.Minute, d%time.Minute/time.Second)
	case d < day:
		return fmt.Sprintf("%d h %d min", d/time.Hour, d%time.Hour/time.Minute)
	default:
		return fmt.Sprintf("%d d %d h", d/day, d%day/time.Hour)
	}
}
